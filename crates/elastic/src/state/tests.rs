use proptest::prelude::*;
use trainyard_rendezvous::Address;

use super::*;

const GRACE: GracePeriods = GracePeriods {
    leave: Duration::from_secs(30),
    abort: Duration::from_millis(500),
};

fn assignment(epoch: u64) -> RankAssignment {
    RankAssignment {
        epoch: Epoch(epoch),
        node_rank: 0,
        num_nodes: 2,
        first_rank: 0,
        world_size: 2,
        restarts: 0,
        store: Address {
            host: "a".into(),
            port: 1,
        },
        hosts_store: false,
    }
}

fn run(epoch: u64) -> Event {
    Event::Decided(Decision::Run(assignment(epoch)))
}

fn wait(epoch: u64) -> Event {
    let (epoch, reason) = (Epoch(epoch), "test".into());
    Event::Decided(Decision::Wait { epoch, reason })
}

fn stopped(epoch: u64) -> Action {
    Action::Report(Epoch(epoch), Report::Stopped)
}

fn failure() -> Event {
    Event::WorkerFailed {
        message: "rank 1".into(),
        is_final: false,
    }
}

struct Agent {
    state: State,
    now: Instant,
}

impl Agent {
    fn new() -> Agent {
        Agent {
            state: State::new(GRACE),
            now: Instant::now(),
        }
    }

    fn running(epoch: u64) -> Agent {
        let mut agent = Agent::new();
        assert_eq!(agent.after(run(epoch)), [Action::Start(assignment(epoch))]);
        agent
    }

    fn after(&mut self, event: Event) -> Vec<Action> {
        self.state.on_event(event, self.now)
    }

    fn later(&mut self, time: Duration) -> Vec<Action> {
        self.now += time;
        self.after(Event::Tick)
    }
}

#[test]
fn workers_of_a_broken_world_stop_before_the_next_ones_start() {
    let mut agent = Agent::running(1);
    assert_eq!(agent.after(wait(1)), [Action::Abort]);
    assert_eq!(agent.state.deadline(), Some(agent.now + GRACE.abort));
    assert_eq!(agent.later(GRACE.abort), [Action::Signal(Signal::KILL)]);
    assert_eq!(agent.after(Event::WorkersExited), [stopped(1)]);
    assert_eq!(agent.after(wait(1)), [], "it is reported once");
    assert_eq!(agent.after(run(2)), [Action::Start(assignment(2))]);
}

#[test]
fn a_failure_is_reported_at_once_and_the_other_workers_are_stopped() {
    let mut agent = Agent::running(1);
    let message = "rank 1".into();
    let failed = Action::Report(
        Epoch(1),
        Report::Failed {
            message,
            is_final: false,
        },
    );
    assert_eq!(agent.after(failure()), [failed, Action::Abort]);
    assert_eq!(
        agent.after(failure()),
        [],
        "only the first failure is reported"
    );
    assert_eq!(agent.after(wait(1)), []);
    assert_eq!(agent.after(Event::WorkersExited), [stopped(1)]);
}

#[test]
fn workers_that_exit_before_the_decision_are_reported_as_stopped_after_it() {
    let mut agent = Agent::running(1);
    agent.after(failure());
    assert_eq!(agent.after(Event::WorkersExited), []);
    assert_eq!(agent.after(wait(1)), [stopped(1)]);
}

#[test]
fn success_is_reported_and_the_agent_waits_for_the_end_of_the_run() {
    let mut agent = Agent::running(1);
    let succeeded = Action::Report(Epoch(1), Report::Succeeded);
    assert_eq!(agent.after(Event::WorkersExited), [succeeded]);
    assert_eq!(
        agent.after(run(1)),
        [],
        "workers of an epoch are not started twice"
    );
    let close = Event::Decided(Decision::Close(RunOutcome::Succeeded));
    let exit = Action::Exit(AgentExit::RunEnded(RunOutcome::Succeeded));
    assert_eq!(agent.after(close), [exit]);
}

#[test]
fn split_brain_an_expired_lease_kills_at_once() {
    let mut agent = Agent::running(3);
    let expired = Event::Decided(Decision::LeaseExpired { epoch: Epoch(3) });
    assert_eq!(agent.after(expired), [Action::Signal(Signal::KILL)]);
    assert_eq!(agent.after(Event::WorkersExited), [stopped(3)]);
    assert_eq!(
        agent.after(run(3)),
        [],
        "the agent never returns to that epoch"
    );
    assert_eq!(agent.after(run(5)), [Action::Start(assignment(5))]);
}

#[test]
fn an_expired_lease_ends_the_grace_period() {
    let mut agent = Agent::running(1);
    agent.after(wait(1));
    let expired = Event::Decided(Decision::LeaseExpired { epoch: Epoch(1) });
    assert_eq!(agent.after(expired), [Action::Signal(Signal::KILL)]);
}

#[test]
fn an_agent_without_workers_reports_stopped() {
    let mut agent = Agent::new();
    assert_eq!(agent.after(wait(0)), [], "there was no world yet");
    assert_eq!(agent.after(wait(4)), [stopped(4)]);
}

#[test]
fn a_signal_gives_workers_their_grace_period_and_then_the_agent_leaves() {
    let mut agent = Agent::running(1);
    let signal = Event::Signal(Signal::INT);
    assert_eq!(agent.after(signal.clone()), [Action::Signal(Signal::INT)]);
    assert_eq!(agent.later(GRACE.abort), []);
    assert_eq!(
        agent.after(failure()),
        [],
        "a worker that is being stopped cannot fail"
    );
    assert_eq!(agent.after(run(2)), []);
    let exit = Action::Exit(AgentExit::Interrupted(Signal::INT));
    assert_eq!(agent.after(Event::WorkersExited), [Action::Leave, exit]);

    let mut agent = Agent::running(1);
    agent.after(signal.clone());
    assert_eq!(agent.after(signal.clone()), [Action::Signal(Signal::KILL)]);

    let mut idle = Agent::new();
    assert_eq!(idle.after(signal)[0], Action::Leave);
}

#[test]
fn split_brain_a_leaving_agent_gets_no_time_beyond_its_lease() {
    let mut agent = Agent::running(1);
    agent.after(Event::Signal(Signal::TERM));
    assert_eq!(agent.after(wait(1)), [], "the workers may still save");
    let expired = Event::Decided(Decision::LeaseExpired { epoch: Epoch(1) });
    assert_eq!(agent.after(expired), [Action::Signal(Signal::KILL)]);
    let exit = Action::Exit(AgentExit::Interrupted(Signal::TERM));
    assert_eq!(agent.after(Event::WorkersExited), [Action::Leave, exit]);
}

#[test]
fn a_skipped_start_is_not_reported() {
    let mut agent = Agent::running(1);
    assert_eq!(agent.after(Event::StartSkipped), []);
    assert_eq!(agent.after(wait(1)), [stopped(1)]);
}

#[test]
fn a_disconnected_agent_kills_its_workers() {
    let mut agent = Agent::running(1);
    let disconnected = Event::Disconnected(RendezvousError::Left);
    assert_eq!(agent.after(disconnected), [Action::Signal(Signal::KILL)]);
    let exit = Action::Exit(AgentExit::Disconnected(RendezvousError::Left));
    assert_eq!(agent.after(Event::WorkersExited), [exit]);
}

fn any_event() -> impl Strategy<Value = u8> {
    0u8..10
}

proptest! {
    /// For any sequence of events: workers of one epoch at a time, no epoch started twice, and none started after the
    /// agent reported that its workers have stopped.
    #[test]
    fn one_epoch_at_a_time(events in prop::collection::vec((any_event(), 0u64..6, 0u64..700), 0..60)) {
        let mut agent = Agent::new();
        let mut alive: Option<u64> = None;
        let (mut newest, mut reported) = (0, 0);
        for (kind, epoch, millis) in events {
            agent.now += Duration::from_millis(millis);
            let event = match kind {
                0 | 1 => run(epoch),
                2 | 3 => wait(epoch),
                4 => Event::Decided(Decision::LeaseExpired { epoch: Epoch(epoch) }),
                5 => Event::Decided(Decision::Standby { epoch: Epoch(epoch) }),
                6 if alive.is_some() => failure(),
                7 | 8 if alive.is_some() => { alive = None; Event::WorkersExited }
                9 => Event::Signal(Signal::TERM),
                _ => Event::Tick,
            };
            for action in agent.after(event) {
                match action {
                    Action::Start(assignment) => {
                        prop_assert!(alive.is_none());
                        prop_assert!(assignment.epoch.0 > newest.max(reported), "an epoch was reused");
                        newest = assignment.epoch.0;
                        alive = Some(newest);
                    }
                    Action::Report(epoch, Report::Stopped) => {
                        prop_assert!(alive.is_none());
                        prop_assert!(epoch.0 > reported);
                        reported = epoch.0;
                    }
                    Action::Leave | Action::Exit(_) => prop_assert!(alive.is_none()),
                    Action::Signal(_) | Action::Abort => prop_assert!(alive.is_some()),
                    Action::Report(..) => {}
                }
            }
        }
    }
}

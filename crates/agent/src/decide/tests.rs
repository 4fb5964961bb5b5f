use proptest::prelude::*;
use trainyard_rendezvous::Address;

use super::*;

const GRACES: Graces = Graces {
    leaving: Duration::from_secs(30),
    broken: Duration::from_millis(500),
};

fn place(epoch: u64) -> Place {
    Place {
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
        holds_store: false,
    }
}

fn run(epoch: u64) -> Event {
    Event::Told(Decision::Run(place(epoch)))
}

fn wait(epoch: u64) -> Event {
    let (epoch, reason) = (Epoch(epoch), "test".into());
    Event::Told(Decision::Wait { epoch, reason })
}

fn stopped(epoch: u64) -> Action {
    Action::Report(Epoch(epoch), Report::Stopped)
}

fn failure() -> Event {
    Event::Failed {
        message: "rank 1".into(),
    }
}

struct Agent {
    state: State,
    now: Instant,
}

impl Agent {
    fn new() -> Agent {
        Agent {
            state: State::new(GRACES),
            now: Instant::now(),
        }
    }

    fn running(epoch: u64) -> Agent {
        let mut agent = Agent::new();
        assert_eq!(agent.after(run(epoch)), [Action::Start(place(epoch))]);
        agent
    }

    fn after(&mut self, event: Event) -> Vec<Action> {
        self.state.after(event, self.now)
    }

    fn later(&mut self, time: Duration) -> Vec<Action> {
        self.now += time;
        self.after(Event::Tick)
    }
}

#[test]
fn a_broken_world_ends_before_the_next_begins() {
    let mut agent = Agent::running(1);
    assert_eq!(agent.after(wait(1)), [Action::Dismiss]);
    assert_eq!(agent.state.wake_at(), Some(agent.now + GRACES.broken));
    assert_eq!(agent.later(GRACES.broken), [Action::Tell(Signal::KILL)]);
    assert_eq!(agent.after(Event::Ended), [stopped(1)]);
    assert_eq!(agent.after(wait(1)), [], "it is said once");
    assert_eq!(agent.after(run(2)), [Action::Start(place(2))]);
}

#[test]
fn a_failure_is_told_at_once_and_the_rest_are_stopped() {
    let mut agent = Agent::running(1);
    let message = "rank 1".into();
    let failed = Action::Report(Epoch(1), Report::Failed { message });
    assert_eq!(agent.after(failure()), [failed, Action::Dismiss]);
    assert_eq!(agent.after(failure()), [], "the first is what counts");
    assert_eq!(agent.after(wait(1)), []);
    assert_eq!(agent.after(Event::Ended), [stopped(1)]);
}

#[test]
fn workers_that_end_before_the_others_know_are_not_taken_for_stopped() {
    let mut agent = Agent::running(1);
    agent.after(failure());
    assert_eq!(agent.after(Event::Ended), []);
    assert_eq!(agent.after(wait(1)), [stopped(1)]);
}

#[test]
fn success_is_told_and_the_end_awaited() {
    let mut agent = Agent::running(1);
    let succeeded = Action::Report(Epoch(1), Report::Succeeded);
    assert_eq!(agent.after(Event::Ended), [succeeded]);
    assert_eq!(agent.after(run(1)), [], "they are not started twice");
    let close = Event::Told(Decision::Close(Close::Succeeded));
    let end = Action::End(Ending::Closed(Close::Succeeded));
    assert_eq!(agent.after(close), [end]);
}

#[test]
fn split_brain_a_lapsed_lease_kills_at_once() {
    let mut agent = Agent::running(3);
    let lapsed = Event::Told(Decision::Lapsed { epoch: Epoch(3) });
    assert_eq!(agent.after(lapsed), [Action::Tell(Signal::KILL)]);
    assert_eq!(agent.after(Event::Ended), [stopped(3)]);
    assert_eq!(agent.after(run(3)), [], "it never goes back to that epoch");
    assert_eq!(agent.after(run(5)), [Action::Start(place(5))]);
}

#[test]
fn a_lapse_does_not_wait_for_a_grace() {
    let mut agent = Agent::running(1);
    agent.after(wait(1));
    let lapsed = Event::Told(Decision::Lapsed { epoch: Epoch(1) });
    assert_eq!(agent.after(lapsed), [Action::Tell(Signal::KILL)]);
}

#[test]
fn who_had_no_workers_says_so() {
    let mut agent = Agent::new();
    assert_eq!(agent.after(wait(0)), [], "there was no world");
    assert_eq!(agent.after(wait(4)), [stopped(4)]);
}

#[test]
fn a_signal_gives_workers_time_then_the_agent_leaves() {
    let mut agent = Agent::running(1);
    let signal = Event::Signal(Signal::INT);
    assert_eq!(agent.after(signal.clone()), [Action::Tell(Signal::INT)]);
    assert_eq!(agent.later(GRACES.broken), []);
    assert_eq!(agent.after(failure()), [], "nobody's failure");
    assert_eq!(agent.after(run(2)), []);
    let end = Action::End(Ending::Interrupted(Signal::INT));
    assert_eq!(agent.after(Event::Ended), [Action::Leave, end]);

    let mut agent = Agent::running(1);
    agent.after(signal.clone());
    assert_eq!(agent.after(signal.clone()), [Action::Tell(Signal::KILL)]);

    let mut idle = Agent::new();
    assert_eq!(idle.after(signal)[0], Action::Leave);
}

#[test]
fn split_brain_who_leaves_has_no_time_beyond_its_lease() {
    let mut agent = Agent::running(1);
    agent.after(Event::Signal(Signal::TERM));
    assert_eq!(agent.after(wait(1)), [], "it may still save");
    let lapsed = Event::Told(Decision::Lapsed { epoch: Epoch(1) });
    assert_eq!(agent.after(lapsed), [Action::Tell(Signal::KILL)]);
    let end = Action::End(Ending::Interrupted(Signal::TERM));
    assert_eq!(agent.after(Event::Ended), [Action::Leave, end]);
}

#[test]
fn a_place_that_is_gone_is_not_reported() {
    let mut agent = Agent::running(1);
    assert_eq!(agent.after(Event::NotStarted), []);
    assert_eq!(agent.after(wait(1)), [stopped(1)]);
}

#[test]
fn without_a_way_to_the_run_nothing_runs() {
    let mut agent = Agent::running(1);
    let cut = Event::Cut(RendezvousError::Left);
    assert_eq!(agent.after(cut), [Action::Tell(Signal::KILL)]);
    let end = Action::End(Ending::Cut(RendezvousError::Left));
    assert_eq!(agent.after(Event::Ended), [end]);
}

fn any_event() -> impl Strategy<Value = u8> {
    0u8..10
}

proptest! {
    /// Whatever happens, in whatever order: never two sets of workers, no epoch twice or again, none
    /// of an epoch after it was said to be stopped.
    #[test]
    fn one_epoch_at_a_time(events in prop::collection::vec((any_event(), 0u64..6, 0u64..700), 0..60)) {
        let mut agent = Agent::new();
        let mut alive: Option<u64> = None;
        let (mut newest, mut said) = (0, 0);
        for (kind, epoch, millis) in events {
            agent.now += Duration::from_millis(millis);
            let event = match kind {
                0 | 1 => run(epoch),
                2 | 3 => wait(epoch),
                4 => Event::Told(Decision::Lapsed { epoch: Epoch(epoch) }),
                5 => Event::Told(Decision::Park { epoch: Epoch(epoch) }),
                6 if alive.is_some() => failure(),
                7 | 8 if alive.is_some() => { alive = None; Event::Ended }
                9 => Event::Signal(Signal::TERM),
                _ => Event::Tick,
            };
            for action in agent.after(event) {
                match action {
                    Action::Start(place) => {
                        prop_assert!(alive.is_none());
                        prop_assert!(place.epoch.0 > newest.max(said), "an epoch again");
                        newest = place.epoch.0;
                        alive = Some(newest);
                    }
                    Action::Report(epoch, Report::Stopped) => {
                        prop_assert!(alive.is_none());
                        prop_assert!(epoch.0 > said);
                        said = epoch.0;
                    }
                    Action::Leave | Action::End(_) => prop_assert!(alive.is_none()),
                    Action::Tell(_) | Action::Dismiss => prop_assert!(alive.is_some()),
                    Action::Report(..) => {}
                }
            }
        }
    }
}

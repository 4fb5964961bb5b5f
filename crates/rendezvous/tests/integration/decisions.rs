//! The decision function, one hazard per test.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use trainyard_rendezvous::{
    Action, Address, Cause, Decision, Epoch, Event, Join, LeaseClock, NodeInfo, Phase, Policy,
    Reason, Rejection, Report, RunOutcome, RunState, State, Watermark, step,
};

const SECOND: Duration = Duration::from_secs(1);

fn node_info(node: &str, instance: u64) -> NodeInfo {
    NodeInfo {
        node: node.into(),
        instance,
        num_workers: 2,
        capabilities: BTreeSet::new(),
        node_rank: None,
        store: Address {
            host: format!("{node}.local"),
            port: 29500,
        },
    }
}

/// A run that a test drives event by event.
struct Run {
    state: Option<State>,
    now: Duration,
    policy: Policy,
    published: Vec<RunState>,
}

impl Run {
    fn new(policy: Policy) -> Run {
        Run {
            state: Some(State::resume(
                RunState::new("job"),
                LeaseClock::Local,
                Duration::ZERO,
            )),
            now: Duration::ZERO,
            policy,
            published: Vec::new(),
        }
    }

    fn state(&self) -> &State {
        self.state.as_ref().unwrap()
    }

    fn run_state(&self) -> &RunState {
        self.state().run_state()
    }

    fn event(&mut self, event: Event) -> Result<(), Rejection> {
        let step = step(self.state.take().unwrap(), event, self.now);
        self.state = Some(step.state);
        let mut result = Ok(());
        for action in step.actions {
            match action {
                Action::Publish => self.published.push(self.run_state().clone()),
                Action::Reject(rejection) => result = Err(rejection),
                Action::Accept => {}
            }
        }
        assert!(result.is_ok() || matches!(step.reason, Reason::Rejected(_)));
        result
    }

    fn join_as(&mut self, node_info: NodeInfo) -> Result<(), Rejection> {
        let join = Join {
            run: "job".into(),
            policy: self.policy.clone(),
            node_info,
            watermark: Watermark::default(),
            last_report: None,
        };
        self.event(Event::Join(Box::new(join)))
    }

    fn join(&mut self, node: &str) -> Result<(), Rejection> {
        self.join_as(node_info(node, 1))
    }

    fn report(&mut self, node: &str, epoch: u64, report: Report) -> Result<(), Rejection> {
        let (node, epoch) = (node.to_owned(), Epoch(epoch));
        let event = Event::Report {
            node,
            instance: 1,
            epoch,
            report,
        };
        self.event(event)
    }

    fn stop_all(&mut self) {
        let epoch = self.run_state().epoch.0;
        let members: Vec<_> = self
            .state()
            .members()
            .map(|agent| agent.node.clone())
            .collect();
        for node in members {
            let _ = self.report(&node, epoch, Report::Stopped);
        }
    }

    fn leave(&mut self, node: &str) {
        let node = node.to_owned();
        self.event(Event::Leave { node, instance: 1 }).unwrap();
    }

    /// Lets time pass, in which only these nodes send heartbeats.
    fn pass(&mut self, time: Duration, alive: &[&str]) {
        let end = self.now + time;
        while self.now < end {
            self.now = (self.now + SECOND).min(end);
            for node in alive {
                let (node, instance) = ((*node).to_owned(), 1);
                self.event(Event::Heartbeat { node, instance }).unwrap();
            }
            self.event(Event::Tick).unwrap();
        }
    }

    fn world(&self) -> Vec<&str> {
        self.run_state()
            .world
            .iter()
            .map(|member| member.node.as_str())
            .collect()
    }

    fn is_running(&self) -> bool {
        self.run_state().phase == Phase::Running
    }
}

fn failed() -> Report {
    Report::Failed {
        message: "rank 3 exited with code 1".into(),
        is_final: false,
    }
}

#[test]
fn a_world_forms_when_the_maximum_number_of_nodes_has_joined() {
    let mut run = Run::new(Policy::new(2, 2));
    run.join("a").unwrap();
    assert!(!run.is_running());
    run.join("b").unwrap();
    assert!(run.is_running());
    assert_eq!(run.world(), ["a", "b"]);
    let Decision::Run(assignment) = run.state().decision_for(&node_info("b", 1)) else {
        panic!("b must have a rank");
    };
    assert_eq!(
        (assignment.epoch, assignment.node_rank, assignment.num_nodes),
        (Epoch(1), 1, 2)
    );
    assert_eq!((assignment.first_rank, assignment.world_size), (2, 4));
    assert_eq!(assignment.store.to_string(), "a.local:29500");
    assert!(!assignment.hosts_store);
    assert_eq!(run.published.len(), 1, "a join alone publishes nothing");
}

/// A restart would not help, so none is spent.
#[test]
fn a_final_failure_ends_the_run_at_once() {
    let mut policy = Policy::new(2, 2);
    policy.max_restarts = 5;
    let mut run = Run::new(policy);
    run.join("a").unwrap();
    run.join("b").unwrap();
    let report = Report::Failed {
        message: "the loss is not finite".into(),
        is_final: true,
    };
    run.report("a", 1, report).unwrap();
    run.stop_all();
    let Phase::Closed(RunOutcome::Failed { restarts, .. }) = &run.run_state().phase else {
        panic!("{:?}", run.run_state().phase);
    };
    assert_eq!(*restarts, 0);
}

/// Two jobs with the same run id do not become one.
#[test]
fn a_node_with_another_program_is_rejected() {
    let policy = Policy::new(1, 2);
    let mut run = Run::new(policy.clone().for_command(&["train", "a.toml"]));
    run.join("a").unwrap();
    run.policy = policy.for_command(&["train", "b.toml"]);
    let rejected = run.join("b").unwrap_err();
    assert!(matches!(rejected, Rejection::OtherProgram { .. }));
    let text = rejected.to_string();
    assert!(
        text.contains("train a.toml") && text.contains("train b.toml"),
        "{text}"
    );
}

#[test]
fn more_nodes_can_join_until_the_last_call_ends() {
    let mut run = Run::new(Policy::new(2, 4));
    run.join("a").unwrap();
    run.join("b").unwrap();
    run.pass(29 * SECOND, &["a", "b"]);
    run.join("c").unwrap();
    assert!(!run.is_running());
    run.pass(SECOND, &["a", "b", "c"]);
    assert_eq!(run.world(), ["a", "b", "c"]);
}

#[test]
fn a_lost_node_invalidates_the_world_and_a_standby_node_takes_its_rank() {
    let mut run = Run::new(Policy::new(2, 3));
    for node in ["a", "b", "c", "spare"] {
        run.join(node).unwrap();
    }
    assert_eq!(
        run.state().decision_for(&node_info("spare", 1)),
        Decision::Standby { epoch: Epoch(1) }
    );
    run.pass(3 * SECOND, &["a", "c", "spare"]);
    let node = "b".to_owned();
    assert_eq!(run.run_state().phase, Phase::Joining(Cause::Lost { node }));
    run.stop_all();
    assert_eq!(
        (run.world(), run.run_state().epoch),
        (vec!["a", "spare", "c"], Epoch(2))
    );
}

#[test]
fn no_world_forms_while_a_survivor_still_has_workers() {
    let mut run = Run::new(Policy::new(2, 3));
    for node in ["a", "b", "c"] {
        run.join(node).unwrap();
    }
    run.leave("c");
    run.report("a", 1, Report::Stopped).unwrap();
    run.pass(20 * SECOND, &["a", "b"]);
    assert!(!run.is_running());
    run.report("b", 1, Report::Stopped).unwrap();
    assert_eq!(run.world(), ["a", "b"]);
}

#[test]
fn split_brain_a_node_that_never_stops_loses_its_lease_before_the_others_continue() {
    let mut policy = Policy::new(2, 3);
    policy.max_restarts = 1;
    let mut run = Run::new(policy);
    for node in ["a", "b", "c"] {
        run.join(node).unwrap();
    }
    run.report("a", 1, failed()).unwrap();
    run.report("a", 1, Report::Stopped).unwrap();
    run.report("b", 1, Report::Stopped).unwrap();
    run.pass(29 * SECOND, &["a", "b", "c"]);
    run.pass(3 * SECOND, &["a", "b"]);
    let (node, instance) = ("c".to_owned(), 1);
    let renewed = run.event(Event::Heartbeat { node, instance });
    assert!(matches!(renewed, Err(Rejection::NoLease { .. })));
    assert_eq!(run.world(), ["a", "b"]);
}

#[test]
fn too_few_survivors_wait_for_more_nodes() {
    let mut run = Run::new(Policy::new(2, 2));
    run.join("a").unwrap();
    run.join("b").unwrap();
    run.leave("b");
    run.stop_all();
    run.pass(100 * SECOND, &["a"]);
    assert!(!run.is_running());
    run.join("d").unwrap();
    assert_eq!(run.world(), ["a", "d"]);
    run.leave("d");
    run.stop_all();
    run.pass(600 * SECOND, &["a"]);
    let outcome = RunOutcome::TimedOut { have: 1, need: 2 };
    assert_eq!(run.run_state().phase, Phase::Closed(outcome));
}

#[test]
fn a_failure_restarts_all_nodes_until_no_restart_is_left() {
    let mut policy = Policy::new(2, 2);
    policy.max_restarts = 1;
    let mut run = Run::new(policy);
    run.join("a").unwrap();
    run.join("b").unwrap();
    run.report("b", 1, failed()).unwrap();
    run.report("a", 1, failed()).unwrap();
    run.stop_all();
    assert_eq!(
        (run.is_running(), run.run_state().restarts),
        (true, 1),
        "two reports of one failure count once"
    );
    assert_eq!(run.world(), ["a", "b"]);
    run.report("a", 2, failed()).unwrap();
    run.stop_all();
    let Phase::Closed(outcome) = &run.run_state().phase else {
        panic!("the run must be closed, because no restart is left");
    };
    assert!(
        outcome.to_string().contains("rank 3 exited with code 1"),
        "{outcome}"
    );
    assert!(matches!(run.join("c"), Err(Rejection::Closed(_))));
}

#[test]
fn a_failure_caused_by_a_lost_node_costs_no_restart() {
    let mut run = Run::new(Policy::new(2, 3));
    for node in ["a", "b", "c"] {
        run.join(node).unwrap();
    }
    // c crashes; the workers of a see a broken connection long before the lease of c expires.
    run.report("a", 1, failed()).unwrap();
    run.report("a", 1, Report::Stopped).unwrap();
    run.report("b", 1, Report::Stopped).unwrap();
    run.pass(4 * SECOND, &["a", "b"]);
    assert_eq!((run.world(), run.run_state().restarts), (vec!["a", "b"], 0));
}

#[test]
fn the_run_succeeds_when_every_node_has_succeeded() {
    let mut run = Run::new(Policy::new(2, 2));
    run.join("a").unwrap();
    run.join("b").unwrap();
    run.report("a", 1, Report::Succeeded).unwrap();
    assert!(run.is_running());
    run.leave("a");
    assert!(run.is_running(), "a node that has succeeded may leave");
    run.report("b", 1, Report::Succeeded).unwrap();
    assert_eq!(run.run_state().phase, Phase::Closed(RunOutcome::Succeeded));
    assert_eq!(run.join("c"), Err(Rejection::Closed(RunOutcome::Succeeded)));
}

#[test]
fn the_world_scales_up_after_a_last_call() {
    let mut policy = Policy::new(1, 3);
    policy.last_call_timeout = 5 * SECOND;
    let mut run = Run::new(policy);
    run.join("a").unwrap();
    run.pass(5 * SECOND, &["a"]);
    assert_eq!(run.world(), ["a"]);
    run.join("b").unwrap();
    run.pass(4 * SECOND, &["a", "b"]);
    assert!(
        run.is_running(),
        "the run waits for more nodes, so that one interruption serves several"
    );
    run.pass(SECOND, &["a", "b"]);
    assert_eq!(run.run_state().phase, Phase::Joining(Cause::ScaleUp));
    run.stop_all();
    assert_eq!(
        (run.world(), run.run_state().epoch, run.run_state().restarts),
        (vec!["a", "b"], Epoch(2), 0)
    );
}

#[test]
fn split_brain_a_report_under_an_expired_lease_is_rejected() {
    let mut run = Run::new(Policy::new(1, 2));
    run.join("a").unwrap();
    run.join("b").unwrap();
    // There was no step when b's lease expired, so its report is the first event after that.
    run.now = 3 * SECOND;
    let node = "b".to_owned();
    assert_eq!(
        run.report("b", 1, Report::Succeeded),
        Err(Rejection::NoLease { node })
    );
}

#[test]
fn split_brain_a_report_about_another_epoch_is_rejected() {
    let mut run = Run::new(Policy::new(1, 2));
    run.join("a").unwrap();
    run.join("b").unwrap();
    run.leave("b");
    run.stop_all();
    run.pass(SECOND, &["a"]);
    let (given, current) = (Epoch(1), Epoch(2));
    assert_eq!(
        run.report("a", 1, failed()),
        Err(Rejection::StaleEpoch { given, current })
    );
    assert!(run.is_running());
    let (given, current) = (Epoch(9), Epoch(2));
    assert_eq!(
        run.report("a", 9, failed()),
        Err(Rejection::StaleEpoch { given, current })
    );
}

#[test]
fn split_brain_two_agents_of_one_name_cannot_both_join() {
    let mut run = Run::new(Policy::new(2, 2));
    run.join("a").unwrap();
    let node = "a".to_owned();
    assert_eq!(
        run.join_as(node_info("a", 2)),
        Err(Rejection::NameTaken { node })
    );
    run.pass(3 * SECOND, &[]);
    run.join_as(node_info("a", 2)).unwrap();
    let node = "a".to_owned();
    assert_eq!(
        run.event(Event::Heartbeat {
            node: node.clone(),
            instance: 1
        }),
        Err(Rejection::NoLease { node })
    );
}

#[test]
fn an_agent_that_does_not_fit_is_rejected_with_the_reason() {
    let mut policy = Policy::new(1, 2);
    policy.required_capabilities.insert("cuda".into());
    let mut run = Run::new(policy.clone());
    assert!(matches!(
        run.join("a"),
        Err(Rejection::MissingCapability { .. })
    ));
    let mut a = node_info("a", 1);
    a.capabilities.insert("cuda".into());
    a.node_rank = Some(1);
    run.join_as(a.clone()).unwrap();
    let b = NodeInfo {
        node: "b".into(),
        ..a.clone()
    };
    assert!(matches!(
        run.join_as(b.clone()),
        Err(Rejection::RankTaken { rank: 1, .. })
    ));
    let b = NodeInfo {
        node_rank: Some(2),
        ..b
    };
    assert!(matches!(
        run.join_as(b.clone()),
        Err(Rejection::RankOutOfRange { rank: 2, .. })
    ));
    let b = NodeInfo {
        node_rank: None,
        node: "../b".into(),
        ..b
    };
    assert!(matches!(
        run.join_as(b.clone()),
        Err(Rejection::Malformed { .. })
    ));
    run.policy.max_nodes = 3;
    let rejection = run
        .join_as(NodeInfo {
            node: "b".into(),
            ..b.clone()
        })
        .unwrap_err();
    assert!(
        rejection.to_string().contains("nnodes 1:3, not 1:2"),
        "{rejection}"
    );
    let join = Join {
        run: "other".into(),
        policy,
        node_info: a,
        watermark: Watermark::default(),
        last_report: None,
    };
    assert!(matches!(
        run.event(Event::Join(Box::new(join))),
        Err(Rejection::WrongRun { .. })
    ));
}

#[test]
fn a_decider_that_lost_its_state_reuses_no_epoch() {
    let mut run = Run::new(Policy::new(1, 1));
    let (policy, node_info) = (run.policy.clone(), node_info("a", 1));
    let join = Join {
        run: "job".into(),
        policy,
        node_info,
        watermark: Watermark {
            epoch: Epoch(41),
            version: 7,
        },
        last_report: None,
    };
    run.event(Event::Join(Box::new(join))).unwrap();
    assert_eq!(run.run_state().epoch, Epoch(42));
    assert!(
        run.run_state().version > 7,
        "otherwise the agent would ignore it"
    );
}

#[test]
fn a_restart_of_the_decider_does_not_interrupt_the_run() {
    let mut run = Run::new(Policy::new(2, 2));
    run.join("a").unwrap();
    run.join("b").unwrap();
    let run_state = run.published.last().unwrap().clone();
    run.state = Some(State::resume(
        run_state.clone(),
        LeaseClock::Local,
        Duration::ZERO,
    ));
    run.now = SECOND;
    run.join("a").unwrap();
    let (node, instance) = ("b".to_owned(), 1);
    let renewed = run.event(Event::Heartbeat { node, instance });
    assert!(
        matches!(renewed, Err(Rejection::NoLease { .. })),
        "b must join again, because its last report is unknown"
    );
    run.join("b").unwrap();
    run.pass(SECOND, &["a", "b"]);
    assert_eq!(run.run_state(), &run_state);
    run.pass(3 * SECOND, &["a"]);
    assert!(!run.is_running(), "b did not come back and is lost");
}

fn any_event() -> impl Strategy<Value = (u8, usize, u64, u64)> {
    (0u8..12, 0usize..6, 1u64..3, 0u64..2500)
}

proptest! {
    /// In any order of events, and however often the decider restarts from its durable state.
    #[test]
    fn an_epoch_is_never_used_twice(
        events in prop::collection::vec(any_event(), 1..300),
        min in 1u32..4, extra in 0u32..3, max_restarts in 0u32..200,
    ) {
        let mut policy = Policy::new(min, min + extra);
        policy.max_restarts = max_restarts;
        policy.last_call_timeout = 2 * SECOND;
        let mut run = Run::new(policy);
        for (kind, node, instance, wait) in events {
            run.now += Duration::from_millis(wait);
            let node = format!("n{node}");
            let epoch = run.run_state().epoch;
            let report = |report| Event::Report { node: node.clone(), instance, epoch, report };
            match kind {
                0..=3 => { let _ = run.join_as(node_info(&node, instance)); }
                4 => { let _ = run.event(Event::Leave { node, instance }); }
                5 => { let _ = run.event(report(Report::Failed { message: "x".into(), is_final: false })); }
                6 => { let _ = run.event(report(Report::Succeeded)); }
                7 | 8 => run.stop_all(),
                9 => { let _ = run.event(Event::Lost { node }); }
                10 => { let _ = run.event(Event::Tick); }
                _ => {
                    let last = run.published.last().cloned().unwrap_or(RunState::new("job"));
                    run.state = Some(State::resume(last, LeaseClock::Local, run.now));
                }
            }
            run.event(Event::Tick).unwrap();
            prop_assert!(run.state().wake_at().is_none_or(|at| at > run.now));
        }
        let mut worlds: BTreeMap<Epoch, Vec<NodeInfo>> = BTreeMap::new();
        for pair in run.published.windows(2) {
            prop_assert!(pair[0].version < pair[1].version && pair[0].epoch <= pair[1].epoch);
            prop_assert!(!matches!(pair[0].phase, Phase::Closed(_)), "a closed run was reopened");
            prop_assert!(pair[1].phase != Phase::Running || pair[0].epoch < pair[1].epoch);
        }
        for run_state in &run.published {
            let nodes = run_state.world.len() as u32;
            prop_assert!(run_state.epoch == Epoch(0) || (min..=min + extra).contains(&nodes));
            let world = worlds.entry(run_state.epoch).or_insert(run_state.world.clone());
            prop_assert_eq!(&*world, &run_state.world);
        }
    }
}

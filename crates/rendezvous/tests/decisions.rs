//! The decision function, one hazard at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use trainyard_rendezvous::{
    Action, Address, Advert, Cause, Close, Decision, Epoch, Event, Join, Leases, Phase, Policy,
    Reason, Record, Refusal, Report, Seen, State, step,
};

const SECOND: Duration = Duration::from_secs(1);

fn advert(node: &str, instance: u64) -> Advert {
    Advert {
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

/// A run, driven by hand.
struct Run {
    state: Option<State>,
    now: Duration,
    policy: Policy,
    published: Vec<Record>,
}

impl Run {
    fn new(policy: Policy) -> Run {
        Run {
            state: Some(State::resume(
                Record::new("job"),
                Leases::Counted,
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

    fn record(&self) -> &Record {
        self.state().record()
    }

    fn event(&mut self, event: Event) -> Result<(), Refusal> {
        let step = step(self.state.take().unwrap(), event, self.now);
        self.state = Some(step.state);
        let mut answer = Ok(());
        for action in step.actions {
            match action {
                Action::Publish => self.published.push(self.record().clone()),
                Action::Refuse(refusal) => answer = Err(refusal),
                Action::Accept => {}
            }
        }
        assert!(answer.is_ok() || matches!(step.reason, Reason::Refused(_)));
        answer
    }

    fn join_as(&mut self, advert: Advert) -> Result<(), Refusal> {
        let join = Join {
            run: "job".into(),
            policy: self.policy.clone(),
            advert,
            seen: Seen::default(),
            said: None,
        };
        self.event(Event::Join(Box::new(join)))
    }

    fn join(&mut self, node: &str) -> Result<(), Refusal> {
        self.join_as(advert(node, 1))
    }

    fn report(&mut self, node: &str, epoch: u64, report: Report) -> Result<(), Refusal> {
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
        let epoch = self.record().epoch.0;
        let there: Vec<_> = self
            .state()
            .attending()
            .map(|agent| agent.node.clone())
            .collect();
        for node in there {
            let _ = self.report(&node, epoch, Report::Stopped);
        }
    }

    fn leave(&mut self, node: &str) {
        let node = node.to_owned();
        self.event(Event::Leave { node, instance: 1 }).unwrap();
    }

    /// Time passes, in which only these are heard of.
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
        self.record()
            .world
            .iter()
            .map(|member| member.node.as_str())
            .collect()
    }

    fn runs(&self) -> bool {
        self.record().phase == Phase::Running
    }
}

fn failed() -> Report {
    Report::Failed {
        message: "rank 3 exited with code 1".into(),
    }
}

#[test]
fn a_world_forms_when_the_last_place_is_taken() {
    let mut run = Run::new(Policy::new(2, 2));
    run.join("a").unwrap();
    assert!(!run.runs());
    run.join("b").unwrap();
    assert!(run.runs());
    assert_eq!(run.world(), ["a", "b"]);
    let Decision::Run(place) = run.state().decision_for(&advert("b", 1)) else {
        panic!("b has a place");
    };
    assert_eq!(
        (place.epoch, place.node_rank, place.num_nodes),
        (Epoch(1), 1, 2)
    );
    assert_eq!((place.first_rank, place.world_size), (2, 4));
    assert_eq!(place.store.to_string(), "a.local:29500");
    assert!(!place.holds_store);
    assert_eq!(run.published.len(), 1, "joins cost no record each");
}

#[test]
fn the_last_call_lets_more_in_and_ends() {
    let mut run = Run::new(Policy::new(2, 4));
    run.join("a").unwrap();
    run.join("b").unwrap();
    run.pass(29 * SECOND, &["a", "b"]);
    run.join("c").unwrap();
    assert!(!run.runs());
    run.pass(SECOND, &["a", "b", "c"]);
    assert_eq!(run.world(), ["a", "b", "c"]);
}

#[test]
fn a_lost_node_breaks_the_world_and_a_parked_one_takes_its_rank() {
    let mut run = Run::new(Policy::new(2, 3));
    for node in ["a", "b", "c", "spare"] {
        run.join(node).unwrap();
    }
    assert_eq!(
        run.state().decision_for(&advert("spare", 1)),
        Decision::Park { epoch: Epoch(1) }
    );
    run.pass(3 * SECOND, &["a", "c", "spare"]);
    let node = "b".to_owned();
    assert_eq!(run.record().phase, Phase::Gathering(Cause::Lost { node }));
    run.stop_all();
    assert_eq!(
        (run.world(), run.record().epoch),
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
    assert!(!run.runs());
    run.report("b", 1, Report::Stopped).unwrap();
    assert_eq!(run.world(), ["a", "b"]);
}

#[test]
fn split_brain_a_node_that_never_stops_loses_its_lease_before_others_go_on() {
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
    let said = run.event(Event::Heartbeat { node, instance });
    assert!(matches!(said, Err(Refusal::NoLease { .. })));
    assert_eq!(run.world(), ["a", "b"]);
}

#[test]
fn too_few_survivors_wait_for_others() {
    let mut run = Run::new(Policy::new(2, 2));
    run.join("a").unwrap();
    run.join("b").unwrap();
    run.leave("b");
    run.stop_all();
    run.pass(100 * SECOND, &["a"]);
    assert!(!run.runs());
    run.join("d").unwrap();
    assert_eq!(run.world(), ["a", "d"]);
    run.leave("d");
    run.stop_all();
    run.pass(600 * SECOND, &["a"]);
    let how = Close::TimedOut { have: 1, need: 2 };
    assert_eq!(run.record().phase, Phase::Closed(how));
}

#[test]
fn a_failure_restarts_everybody_until_restarts_run_out() {
    let mut policy = Policy::new(2, 2);
    policy.max_restarts = 1;
    let mut run = Run::new(policy);
    run.join("a").unwrap();
    run.join("b").unwrap();
    run.report("b", 1, failed()).unwrap();
    run.report("a", 1, failed()).unwrap();
    run.stop_all();
    assert_eq!(
        (run.runs(), run.record().restarts),
        (true, 1),
        "two words about one failure count once"
    );
    assert_eq!(run.world(), ["a", "b"]);
    run.report("a", 2, failed()).unwrap();
    run.stop_all();
    let Phase::Closed(how) = &run.record().phase else {
        panic!("no restart is left");
    };
    assert!(
        how.to_string().contains("rank 3 exited with code 1"),
        "{how}"
    );
    assert!(matches!(run.join("c"), Err(Refusal::Closed(_))));
}

#[test]
fn a_failure_beside_a_lost_node_costs_no_restart() {
    let mut run = Run::new(Policy::new(2, 3));
    for node in ["a", "b", "c"] {
        run.join(node).unwrap();
    }
    // c dies; its neighbours see a broken connection long before the lease ends.
    run.report("a", 1, failed()).unwrap();
    run.report("a", 1, Report::Stopped).unwrap();
    run.report("b", 1, Report::Stopped).unwrap();
    run.pass(4 * SECOND, &["a", "b"]);
    assert_eq!((run.world(), run.record().restarts), (vec!["a", "b"], 0));
}

#[test]
fn the_run_ends_well_when_every_node_has() {
    let mut run = Run::new(Policy::new(2, 2));
    run.join("a").unwrap();
    run.join("b").unwrap();
    run.report("a", 1, Report::Succeeded).unwrap();
    assert!(run.runs());
    run.leave("a");
    assert!(run.runs(), "who has succeeded may go");
    run.report("b", 1, Report::Succeeded).unwrap();
    assert_eq!(run.record().phase, Phase::Closed(Close::Succeeded));
    assert_eq!(run.join("c"), Err(Refusal::Closed(Close::Succeeded)));
}

#[test]
fn a_world_grows_after_a_last_call() {
    let mut policy = Policy::new(1, 3);
    policy.last_call = 5 * SECOND;
    let mut run = Run::new(policy);
    run.join("a").unwrap();
    run.pass(5 * SECOND, &["a"]);
    assert_eq!(run.world(), ["a"]);
    run.join("b").unwrap();
    run.pass(4 * SECOND, &["a", "b"]);
    assert!(
        run.runs(),
        "joins are gathered, so that one interruption serves several"
    );
    run.pass(SECOND, &["a", "b"]);
    assert_eq!(run.record().phase, Phase::Gathering(Cause::Grows));
    run.stop_all();
    assert_eq!(
        (run.world(), run.record().epoch, run.record().restarts),
        (vec!["a", "b"], Epoch(2), 0)
    );
}

#[test]
fn split_brain_an_expired_lease_is_not_listened_to() {
    let mut run = Run::new(Policy::new(1, 2));
    run.join("a").unwrap();
    run.join("b").unwrap();
    // Nobody looked while b's lease ran out: its word comes first, and is refused all the same.
    run.now = 3 * SECOND;
    let node = "b".to_owned();
    assert_eq!(
        run.report("b", 1, Report::Succeeded),
        Err(Refusal::NoLease { node })
    );
}

#[test]
fn split_brain_an_old_epoch_is_not_listened_to() {
    let mut run = Run::new(Policy::new(1, 2));
    run.join("a").unwrap();
    run.join("b").unwrap();
    run.leave("b");
    run.stop_all();
    run.pass(SECOND, &["a"]);
    let (given, current) = (Epoch(1), Epoch(2));
    assert_eq!(
        run.report("a", 1, failed()),
        Err(Refusal::StaleEpoch { given, current })
    );
    assert!(run.runs());
    let (given, current) = (Epoch(9), Epoch(2));
    assert_eq!(
        run.report("a", 9, failed()),
        Err(Refusal::StaleEpoch { given, current })
    );
}

#[test]
fn split_brain_two_agents_of_one_name_are_not_both_there() {
    let mut run = Run::new(Policy::new(2, 2));
    run.join("a").unwrap();
    let node = "a".to_owned();
    assert_eq!(
        run.join_as(advert("a", 2)),
        Err(Refusal::NameTaken { node })
    );
    run.pass(3 * SECOND, &[]);
    run.join_as(advert("a", 2)).unwrap();
    let node = "a".to_owned();
    assert_eq!(
        run.event(Event::Heartbeat {
            node: node.clone(),
            instance: 1
        }),
        Err(Refusal::NoLease { node })
    );
}

#[test]
fn a_stranger_is_told_why() {
    let mut policy = Policy::new(1, 2);
    policy.requires.insert("cuda".into());
    let mut run = Run::new(policy.clone());
    assert!(matches!(run.join("a"), Err(Refusal::Lacks { .. })));
    let mut a = advert("a", 1);
    a.capabilities.insert("cuda".into());
    a.node_rank = Some(1);
    run.join_as(a.clone()).unwrap();
    let b = Advert {
        node: "b".into(),
        ..a.clone()
    };
    assert!(matches!(
        run.join_as(b.clone()),
        Err(Refusal::RankTaken { rank: 1, .. })
    ));
    let b = Advert {
        node_rank: Some(2),
        ..b
    };
    assert!(matches!(
        run.join_as(b.clone()),
        Err(Refusal::RankTooHigh { rank: 2, .. })
    ));
    let b = Advert {
        node_rank: None,
        node: "../b".into(),
        ..b
    };
    assert!(matches!(
        run.join_as(b.clone()),
        Err(Refusal::Malformed { .. })
    ));
    run.policy.max_nodes = 3;
    let refusal = run
        .join_as(Advert {
            node: "b".into(),
            ..b.clone()
        })
        .unwrap_err();
    assert!(
        refusal.to_string().contains("nnodes 1:3, not 1:2"),
        "{refusal}"
    );
    let join = Join {
        run: "other".into(),
        policy,
        advert: a,
        seen: Seen::default(),
        said: None,
    };
    assert!(matches!(
        run.event(Event::Join(Box::new(join))),
        Err(Refusal::OtherRun { .. })
    ));
}

#[test]
fn a_decider_that_forgot_everything_reuses_no_epoch() {
    let mut run = Run::new(Policy::new(1, 1));
    let (policy, advert) = (run.policy.clone(), advert("a", 1));
    let join = Join {
        run: "job".into(),
        policy,
        advert,
        seen: Seen {
            epoch: Epoch(41),
            version: 7,
        },
        said: None,
    };
    run.event(Event::Join(Box::new(join))).unwrap();
    assert_eq!(run.record().epoch, Epoch(42));
    assert!(
        run.record().version > 7,
        "or whoever knows version 7 would not believe it"
    );
}

#[test]
fn a_decider_that_restarts_disturbs_nobody() {
    let mut run = Run::new(Policy::new(2, 2));
    run.join("a").unwrap();
    run.join("b").unwrap();
    let record = run.published.last().unwrap().clone();
    run.state = Some(State::resume(
        record.clone(),
        Leases::Counted,
        Duration::ZERO,
    ));
    run.now = SECOND;
    run.join("a").unwrap();
    let (node, instance) = ("b".to_owned(), 1);
    let said = run.event(Event::Heartbeat { node, instance });
    assert!(
        matches!(said, Err(Refusal::NoLease { .. })),
        "what b said before is to be said again"
    );
    run.join("b").unwrap();
    run.pass(SECOND, &["a", "b"]);
    assert_eq!(run.record(), &record);
    run.pass(3 * SECOND, &["a"]);
    assert!(!run.runs(), "but who does not come back is lost");
}

fn any_event() -> impl Strategy<Value = (u8, usize, u64, u64)> {
    (0u8..12, 0usize..6, 1u64..3, 0u64..2500)
}

proptest! {
    /// Whatever happens in whatever order, and however often the decider restarts from its record.
    #[test]
    fn an_epoch_is_never_used_twice(
        events in prop::collection::vec(any_event(), 1..300),
        min in 1u32..4, extra in 0u32..3, max_restarts in 0u32..200,
    ) {
        let mut policy = Policy::new(min, min + extra);
        policy.max_restarts = max_restarts;
        policy.last_call = 2 * SECOND;
        let mut run = Run::new(policy);
        for (kind, node, instance, wait) in events {
            run.now += Duration::from_millis(wait);
            let node = format!("n{node}");
            let epoch = run.record().epoch;
            let report = |report| Event::Report { node: node.clone(), instance, epoch, report };
            match kind {
                0..=3 => { let _ = run.join_as(advert(&node, instance)); }
                4 => { let _ = run.event(Event::Leave { node, instance }); }
                5 => { let _ = run.event(report(Report::Failed { message: "x".into() })); }
                6 => { let _ = run.event(report(Report::Succeeded)); }
                7 | 8 => run.stop_all(),
                9 => { let _ = run.event(Event::Lost { node }); }
                10 => { let _ = run.event(Event::Tick); }
                _ => {
                    let last = run.published.last().cloned().unwrap_or(Record::new("job"));
                    run.state = Some(State::resume(last, Leases::Counted, run.now));
                }
            }
            run.event(Event::Tick).unwrap();
            prop_assert!(run.state().wake_at().is_none_or(|at| at > run.now));
        }
        let mut worlds: BTreeMap<Epoch, Vec<Advert>> = BTreeMap::new();
        for pair in run.published.windows(2) {
            prop_assert!(pair[0].version < pair[1].version && pair[0].epoch <= pair[1].epoch);
            prop_assert!(!matches!(pair[0].phase, Phase::Closed(_)), "a run was opened again");
            prop_assert!(pair[1].phase != Phase::Running || pair[0].epoch < pair[1].epoch);
        }
        for record in &run.published {
            let nodes = record.world.len() as u32;
            prop_assert!(record.epoch == Epoch(0) || (min..=min + extra).contains(&nodes));
            let world = worlds.entry(record.epoch).or_insert(record.world.clone());
            prop_assert_eq!(&*world, &record.world);
        }
    }
}

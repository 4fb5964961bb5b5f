//! The invariants that must hold under all faults.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use trainyard_rendezvous::{Epoch, Phase, RankAssignment, RunState};

/// Checks the invariants of one simulated run. It sees everything, and nothing depends on it.
pub struct InvariantChecker {
    seed: u64,
    worlds: BTreeMap<Epoch, Vec<String>>,
    newest: RunState,
    committed: Epoch,
    totals: Totals,
}

/// What happened in many runs, as evidence that the simulation exercises the protocol.
#[derive(Default)]
pub struct Totals {
    pub runs: u64,
    pub epochs: u64,
    pub steps: u64,
    pub expired_leases: u64,
    pub rejections: u64,
    /// The longest time from the last fault to a complete world.
    pub slowest: Duration,
}

impl InvariantChecker {
    pub fn new(seed: u64) -> InvariantChecker {
        InvariantChecker {
            seed,
            worlds: BTreeMap::new(),
            newest: RunState::new("job"),
            committed: Epoch(0),
            totals: Totals {
                runs: 1,
                ..Totals::default()
            },
        }
    }

    /// A run state has become durable.
    pub fn durable(&mut self, run_state: &RunState) {
        let seed = self.seed;
        assert!(
            run_state.version > self.newest.version,
            "seed {seed}: the version decreased"
        );
        assert!(
            run_state.epoch >= self.newest.epoch,
            "seed {seed}: the epoch decreased"
        );
        assert!(
            !matches!(self.newest.phase, Phase::Closed(_)),
            "seed {seed}: a closed run was reopened"
        );
        let names: Vec<String> = run_state
            .world
            .iter()
            .map(|member| member.node.clone())
            .collect();
        if run_state.epoch == self.newest.epoch {
            assert_eq!(
                run_state.world, self.newest.world,
                "seed {seed}: two worlds in one epoch"
            );
        } else {
            self.check_survivors(run_state);
            self.totals.epochs += 1;
            self.worlds.insert(run_state.epoch, names);
        }
        self.newest = run_state.clone();
    }

    fn check_survivors(&self, run_state: &RunState) {
        for (before, member) in self.newest.world.iter().enumerate() {
            let now = run_state.rank_of(member);
            if before < run_state.world.len() && now.is_some() {
                assert_eq!(
                    now,
                    Some(before),
                    "seed {}: a survivor's rank changed",
                    self.seed
                );
            }
        }
    }

    /// An agent starts workers with these ranks.
    pub fn started(&self, node: &str, assignment: &RankAssignment) {
        let world = self.worlds.get(&assignment.epoch);
        let world = world.unwrap_or_else(|| {
            panic!("seed {}: {} was never durable", self.seed, assignment.epoch)
        });
        assert_eq!(
            world.len(),
            assignment.num_nodes as usize,
            "seed {}",
            self.seed
        );
        assert_eq!(
            world[assignment.node_rank as usize], node,
            "seed {}",
            self.seed
        );
    }

    /// The workers of an epoch committed a step together.
    pub fn step(&mut self, epoch: Epoch) {
        let newest = self.newest.epoch;
        assert_eq!(
            epoch, newest,
            "seed {}: an old world committed a step",
            self.seed
        );
        assert!(
            epoch >= self.committed,
            "seed {}: two worlds committed steps",
            self.seed
        );
        self.committed = epoch;
        self.totals.steps += 1;
    }

    pub fn lease_expired(&mut self) {
        self.totals.expired_leases += 1;
    }

    pub fn rejected(&mut self) {
        self.totals.rejections += 1;
    }

    /// The members of a world.
    pub fn world(&self, epoch: Epoch) -> &[String] {
        self.worlds.get(&epoch).map_or(&[], Vec::as_slice)
    }

    pub fn newest(&self) -> &RunState {
        &self.newest
    }

    /// The world was complete again this long after the last fault.
    pub fn recovered(mut self, after: Duration) -> Totals {
        self.totals.slowest = after;
        self.totals
    }
}

impl Totals {
    pub fn add(&mut self, other: Totals) {
        self.runs += other.runs;
        self.epochs += other.epochs;
        self.steps += other.steps;
        self.expired_leases += other.expired_leases;
        self.rejections += other.rejections;
        self.slowest = self.slowest.max(other.slowest);
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Totals {
            runs,
            epochs,
            steps,
            expired_leases,
            rejections,
            slowest,
        } = self;
        write!(
            f,
            "{runs} runs, {epochs} epochs, {steps} steps, {expired_leases} expired leases, {rejections} rejected joins; \
             recovered at most {slowest:?} after the last fault"
        )
    }
}

//! What must hold whatever happens. The judge sees everything, and nobody sees the judge.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use trainyard_rendezvous::{Epoch, Phase, Place, Record};

/// Watches one simulated run.
pub struct Judge {
    seed: u64,
    worlds: BTreeMap<Epoch, Vec<String>>,
    newest: Record,
    committed: Epoch,
    totals: Totals,
}

/// What happened in many runs, to see that anything did.
#[derive(Default)]
pub struct Totals {
    pub runs: u64,
    pub epochs: u64,
    pub steps: u64,
    pub lapses: u64,
    pub refusals: u64,
    /// The longest time from the end of all faults to a world that works.
    pub slowest: Duration,
}

impl Judge {
    pub fn new(seed: u64) -> Judge {
        Judge {
            seed,
            worlds: BTreeMap::new(),
            newest: Record::new("job"),
            committed: Epoch(0),
            totals: Totals {
                runs: 1,
                ..Totals::default()
            },
        }
    }

    /// A record has become durable.
    pub fn durable(&mut self, record: &Record) {
        let seed = self.seed;
        assert!(
            record.version > self.newest.version,
            "seed {seed}: versions go back"
        );
        assert!(
            record.epoch >= self.newest.epoch,
            "seed {seed}: epochs go back"
        );
        assert!(
            !matches!(self.newest.phase, Phase::Closed(_)),
            "seed {seed}: a closed run was opened"
        );
        let names: Vec<String> = record
            .world
            .iter()
            .map(|member| member.node.clone())
            .collect();
        if record.epoch == self.newest.epoch {
            assert_eq!(
                record.world, self.newest.world,
                "seed {seed}: one epoch, two worlds"
            );
        } else {
            self.check_survivors(record);
            self.totals.epochs += 1;
            self.worlds.insert(record.epoch, names);
        }
        self.newest = record.clone();
    }

    fn check_survivors(&self, record: &Record) {
        for (before, member) in self.newest.world.iter().enumerate() {
            let now = record.rank_of(member);
            if before < record.world.len() && now.is_some() {
                assert_eq!(
                    now,
                    Some(before),
                    "seed {}: a survivor's rank changed",
                    self.seed
                );
            }
        }
    }

    /// An agent starts workers at a place.
    pub fn started(&self, node: &str, place: &Place) {
        let world = self.worlds.get(&place.epoch);
        let world = world
            .unwrap_or_else(|| panic!("seed {}: {} was never durable", self.seed, place.epoch));
        assert_eq!(world.len(), place.num_nodes as usize, "seed {}", self.seed);
        assert_eq!(world[place.node_rank as usize], node, "seed {}", self.seed);
    }

    /// Workers of an epoch committed a step: all of its members were in it.
    pub fn step(&mut self, epoch: Epoch) {
        let newest = self.newest.epoch;
        assert_eq!(
            epoch, newest,
            "seed {}: an old world committed a step",
            self.seed
        );
        assert!(
            epoch >= self.committed,
            "seed {}: steps of two worlds",
            self.seed
        );
        self.committed = epoch;
        self.totals.steps += 1;
    }

    pub fn lapsed(&mut self) {
        self.totals.lapses += 1;
    }

    pub fn refused(&mut self) {
        self.totals.refusals += 1;
    }

    /// The members of a world.
    pub fn world(&self, epoch: Epoch) -> &[String] {
        self.worlds.get(&epoch).map_or(&[], Vec::as_slice)
    }

    pub fn newest(&self) -> &Record {
        &self.newest
    }

    /// The run worked again this long after the last fault.
    pub fn healed(mut self, after: Duration) -> Totals {
        self.totals.slowest = after;
        self.totals
    }
}

impl Totals {
    pub fn add(&mut self, other: Totals) {
        self.runs += other.runs;
        self.epochs += other.epochs;
        self.steps += other.steps;
        self.lapses += other.lapses;
        self.refusals += other.refusals;
        self.slowest = self.slowest.max(other.slowest);
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Totals {
            runs,
            epochs,
            steps,
            lapses,
            refusals,
            slowest,
        } = self;
        write!(
            f,
            "{runs} runs, {epochs} epochs, {steps} steps, {lapses} lapsed leases, {refusals} refused joins; \
             whole again at most {slowest:?} after the last fault"
        )
    }
}

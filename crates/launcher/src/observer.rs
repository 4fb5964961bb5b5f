//! Who learns how a job goes while it runs, for example to serve its metrics.

use std::fmt::Debug;
use std::time::Instant;

use trainyard_heartbeat::RankStatus;

use crate::{Job, Outcome};

/// Learns how the ranks of this node are doing. The launcher calls it from its own loop, so it must return at once.
pub trait JobObserver: Debug + Send + Sync {
    /// The ranks of a job have been started, for the first time or again.
    fn started(&self, job: &Job);

    /// The heartbeats of running ranks have been read.
    fn observed(&self, observation: &Observation<'_>);

    /// The ranks have exited.
    fn ended(&self, outcome: &Outcome);
}

/// The state of ranks at one time.
#[derive(Clone, Copy, Debug)]
pub struct Observation<'a> {
    /// The last heartbeats of the running ranks of this node, and of others as far as they are known.
    pub ranks: &'a [RankStatus],
    /// The ranks that are slow without hanging.
    pub slow_ranks: &'a [usize],
    /// The number of ranks that were killed because they hung.
    pub num_hung: usize,
    /// When the heartbeats were read.
    pub now: Instant,
}

//! Collectives that some ranks have entered and that have not completed, and the ranks that they wait for.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use trainyard_trace::CollectiveId;

use crate::{Heartbeat, PendingCollective, RankStatus, Stage};

/// A collective that has not completed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CollectiveInFlight {
    /// The collective.
    pub id: CollectiveId,
    /// The shapes of its tensors, if they are known.
    pub shapes: Vec<Vec<u64>>,
    /// The known ranks that have entered it.
    pub entered: Vec<usize>,
    /// The known ranks of its group that have not.
    pub missing: Vec<usize>,
    /// How long ago a rank entered it.
    pub age: Duration,
    /// How long a rank has been blocked in it; `None` while it overlaps with other work.
    pub blocked_for: Option<Duration>,
}

/// The collectives in flight, in the order in which the first of these ranks names them.
pub fn collectives_in_flight(ranks: &[RankStatus]) -> Vec<CollectiveInFlight> {
    let mut first: Vec<&PendingCollective> = Vec::new();
    for pending in ranks.iter().flat_map(|status| &status.heartbeat.pending) {
        if !first.iter().any(|other| is_same(other, pending)) {
            first.push(pending);
        }
    }
    let describe = |pending| CollectiveInFlight::new(pending, ranks);
    first.into_iter().map(describe).collect()
}

impl CollectiveInFlight {
    fn new(collective: &PendingCollective, ranks: &[RankStatus]) -> CollectiveInFlight {
        let entries = ranks.iter().flat_map(|status| {
            let pending = status.heartbeat.pending.iter();
            let same = pending.filter(|pending| is_same(pending, collective));
            same.map(move |pending| (pending, time_in(status, pending)))
        });
        let entries: Vec<(&PendingCollective, Duration)> = entries.collect();
        let blocked = entries.iter().filter(|(pending, _)| pending.is_blocking);
        let missing = ranks
            .iter()
            .filter(|status| is_missing(&status.heartbeat, collective));
        let entered = ranks
            .iter()
            .filter(|status| has_entered(&status.heartbeat, collective));
        let rank = |status: &RankStatus| status.heartbeat.rank;
        CollectiveInFlight {
            id: collective.id.clone(),
            shapes: collective.shapes.clone(),
            entered: entered.map(rank).collect(),
            missing: missing.map(rank).collect(),
            age: entries
                .iter()
                .map(|(_, time)| *time)
                .max()
                .unwrap_or_default(),
            blocked_for: blocked.map(|(_, time)| *time).max(),
        }
    }
}

fn time_in(status: &RankStatus, pending: &PendingCollective) -> Duration {
    // Statuses of other nodes come over the network, so their durations can be anything.
    let elapsed = status.heartbeat.elapsed_since(pending.since_ns);
    elapsed.saturating_add(status.silent_for)
}

fn has_entered(heartbeat: &Heartbeat, collective: &PendingCollective) -> bool {
    let mut pending = heartbeat.pending.iter();
    pending.any(|other| is_same(other, collective))
}

fn has_completed(heartbeat: &Heartbeat, id: &CollectiveId) -> bool {
    let completed = heartbeat.completed.iter();
    let of_group = completed.filter(|completed| completed.group == id.group);
    of_group.map(|completed| completed.sequence).max() >= Some(id.sequence)
}

/// The peer of a point-to-point operation is not recorded, so no rank is known to be missing from one.
fn is_missing(heartbeat: &Heartbeat, collective: &PendingCollective) -> bool {
    !collective.id.kind.is_point_to_point()
        && collective.members.contains(&heartbeat.rank)
        && heartbeat.stage != Stage::Ended
        && !has_entered(heartbeat, collective)
        && !has_completed(heartbeat, &collective.id)
}

/// Whether two ranks are in the same collective. Every rank numbers its point-to-point operations itself, so those
/// are never the same on two ranks.
fn is_same(a: &PendingCollective, b: &PendingCollective) -> bool {
    if a.id.kind.is_point_to_point() || b.id.kind.is_point_to_point() {
        return a == b;
    }
    a.id.sequence == b.id.sequence && a.id.group == b.id.group && a.members == b.members
}

/// Its name, and the shapes of its tensors.
impl fmt::Display for CollectiveInFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id)?;
        if self.shapes.is_empty() {
            return Ok(());
        }
        let shape = |shape: &Vec<u64>| {
            let dims: Vec<String> = shape.iter().map(u64::to_string).collect();
            format!("[{}]", dims.join(", "))
        };
        let shapes: Vec<String> = self.shapes.iter().map(shape).collect();
        write!(f, " of shape {}", shapes.join(" and "))
    }
}

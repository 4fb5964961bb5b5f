//! Hang diagnosis: which rank and which collective hold up a job, from the status of its ranks.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use trainyard_trace::CollectiveId;

use crate::{Heartbeat, PendingCollective, Stage};

/// Ranks write heartbeats several times a second: a process whose heartbeat has not changed for this long does not
/// run.
const FROZEN_AFTER: Duration = Duration::from_secs(2);

/// A rank as a monitor sees it. The monitor measures how long nothing changed with its own clock, so clocks of
/// different nodes are never compared.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct RankStatus {
    /// The rank's last heartbeat.
    pub heartbeat: Heartbeat,
    /// How long the training loop has made no progress.
    pub stalled_for: Duration,
    /// How long the rank has written no new heartbeat.
    pub silent_for: Duration,
}

impl RankStatus {
    fn is_frozen(&self) -> bool {
        self.silent_for >= FROZEN_AFTER && self.heartbeat.stage != Stage::Ended
    }

    fn time_in(&self, pending: &PendingCollective) -> Duration {
        // Statuses of other nodes come over the network, so their durations can be anything.
        self.heartbeat
            .elapsed_since(pending.since_ns)
            .saturating_add(self.silent_for)
    }
}

/// A reason why a job makes no progress.
#[derive(Clone, Debug, PartialEq)]
pub enum Hang {
    /// The process of a rank does not run: it is stopped, or gets no CPU time.
    Frozen {
        /// The rank.
        rank: usize,
        /// Its current step.
        step: u64,
        /// How long it has written no heartbeat.
        silent_for: Duration,
    },
    /// A rank has not entered a collective in which other ranks wait.
    Missing {
        /// The missing rank.
        rank: usize,
        /// Its current step.
        step: u64,
        /// The collective in which the others wait.
        collective: CollectiveId,
        /// The ranks that wait.
        waiting: Vec<usize>,
        /// How long the first of them has waited.
        waited_for: Duration,
    },
    /// All known ranks have entered a collective that does not complete: the missing rank is on another node, or a
    /// connection is broken.
    Stuck {
        /// The collective.
        collective: CollectiveId,
        /// The ranks that wait in it.
        waiting: Vec<usize>,
        /// How long the first of them has waited.
        waited_for: Duration,
    },
    /// A rank waits in no collective and does not finish its step.
    Stalled {
        /// The rank.
        rank: usize,
        /// Its current step.
        step: u64,
        /// How long it has made no progress.
        stalled_for: Duration,
    },
}

/// Why these ranks make no progress, the likeliest cause first. Empty if there are no ranks.
pub fn diagnose(ranks: &[RankStatus]) -> Vec<Hang> {
    let frozen = ranks.iter().filter(|status| status.is_frozen());
    let mut hangs: Vec<Hang> = frozen
        .map(|status| Hang::Frozen {
            rank: status.heartbeat.rank,
            step: status.heartbeat.step,
            silent_for: status.silent_for,
        })
        .collect();
    match longest_wait(ranks) {
        Some((pending, waited_for)) => {
            hangs.extend(diagnose_collective(pending, waited_for, ranks))
        }
        None => hangs.extend(longest_stalled(ranks)),
    }
    hangs
}

/// The collective in which a rank has waited longest: it holds up all others.
fn longest_wait(ranks: &[RankStatus]) -> Option<(&PendingCollective, Duration)> {
    let blocking = ranks.iter().flat_map(|status| {
        let blocking = status
            .heartbeat
            .pending
            .iter()
            .filter(|pending| pending.is_blocking);
        blocking.map(move |pending| (pending, status.time_in(pending)))
    });
    blocking.max_by_key(|(_, waited_for)| *waited_for)
}

/// The ranks that are missing from a collective. If none is missing, the collective is stuck.
fn diagnose_collective(
    pending: &PendingCollective,
    waited_for: Duration,
    ranks: &[RankStatus],
) -> Vec<Hang> {
    let heartbeats = || ranks.iter().map(|status| &status.heartbeat);
    let has_entered = |heartbeat: &Heartbeat| {
        heartbeat
            .pending
            .iter()
            .any(|other| is_same(other, pending))
    };
    let waiting: Vec<usize> = heartbeats()
        .filter(|h| has_entered(h))
        .map(|h| h.rank)
        .collect();
    let has_completed = |heartbeat: &Heartbeat| {
        let of_group = |id: &&CollectiveId| id.group == pending.id.group;
        let completed = heartbeat.completed.iter().filter(of_group);
        completed.map(|id| id.sequence).max() >= Some(pending.id.sequence)
    };
    // The peer of a point-to-point operation is not recorded.
    let members = heartbeats()
        .filter(|heartbeat| {
            pending.members.contains(&heartbeat.rank) && heartbeat.stage != Stage::Ended
        })
        .filter(|_| !pending.id.kind.is_point_to_point());
    let missing: Vec<Hang> = members
        .filter(|heartbeat| !has_entered(heartbeat) && !has_completed(heartbeat))
        .map(|heartbeat| Hang::Missing {
            rank: heartbeat.rank,
            step: heartbeat.step,
            collective: pending.id.clone(),
            waiting: waiting.clone(),
            waited_for,
        })
        .collect();
    if missing.is_empty() {
        vec![Hang::Stuck {
            collective: pending.id.clone(),
            waiting,
            waited_for,
        }]
    } else {
        missing
    }
}

fn longest_stalled(ranks: &[RankStatus]) -> Option<Hang> {
    let running = ranks
        .iter()
        .filter(|status| status.heartbeat.stage != Stage::Ended);
    running
        .max_by_key(|status| status.stalled_for)
        .map(|status| Hang::Stalled {
            rank: status.heartbeat.rank,
            step: status.heartbeat.step,
            stalled_for: status.stalled_for,
        })
}

/// Whether two ranks are in the same collective. Every rank numbers its point-to-point operations itself, so those
/// are never the same on two ranks.
fn is_same(a: &PendingCollective, b: &PendingCollective) -> bool {
    if a.id.kind.is_point_to_point() || b.id.kind.is_point_to_point() {
        a == b
    } else {
        let identity =
            |pending: &PendingCollective| (pending.id.sequence, pending.id.group.clone());
        identity(a) == identity(b) && a.members == b.members
    }
}

impl Hang {
    /// The rank that causes the hang, if it is a single one.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Hang::Frozen { rank, .. } | Hang::Missing { rank, .. } | Hang::Stalled { rank, .. } => {
                Some(*rank)
            }
            Hang::Stuck { .. } => None,
        }
    }
}

impl fmt::Display for Hang {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |time: &Duration| format!("{:.1} s", time.as_secs_f64());
        match self {
            Hang::Frozen {
                rank,
                step,
                silent_for,
            } => write!(
                f,
                "rank {rank} is not running: its process has been stopped or starved for {} in step {step}",
                seconds(silent_for)
            ),
            Hang::Missing {
                rank,
                step,
                collective,
                waiting,
                waited_for,
            } => write!(
                f,
                "rank {rank} did not enter {collective}; it is in step {step}, and {} for {}",
                have_waited(waiting),
                seconds(waited_for)
            ),
            Hang::Stuck {
                collective,
                waiting,
                waited_for,
            } => write!(
                f,
                "{collective} does not complete; {} in it for {}",
                have_waited(waiting),
                seconds(waited_for)
            ),
            Hang::Stalled {
                rank,
                step,
                stalled_for,
            } => write!(
                f,
                "rank {rank} waits in no collective and has been in step {step} for {}",
                seconds(stalled_for)
            ),
        }
    }
}

fn have_waited(ranks: &[usize]) -> String {
    match ranks {
        [] => "other ranks have waited".to_owned(),
        [rank] => format!("rank {rank} has waited"),
        [first, .., last] if ranks.len() > 4 => {
            format!("{} ranks from {first} to {last} have waited", ranks.len())
        }
        _ => {
            let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
            format!("ranks {} have waited", ranks.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trainyard_trace::{CollectiveKind, Purpose};

    const SECOND: u64 = 1_000_000_000;

    fn id(sequence: u64) -> CollectiveId {
        CollectiveId {
            kind: CollectiveKind::AllGather,
            purpose: Purpose::Parameter,
            group: "dp_shard".to_owned(),
            sequence,
        }
    }

    fn pending(sequence: u64, since_ns: u64) -> PendingCollective {
        PendingCollective {
            id: id(sequence),
            members: vec![0, 1, 2],
            since_ns,
            is_blocking: true,
        }
    }

    fn status(rank: usize, pending: Vec<PendingCollective>, completed: u64) -> RankStatus {
        RankStatus {
            heartbeat: Heartbeat {
                rank,
                stage: Stage::Stepping,
                step: 7,
                since_ns: SECOND,
                written_ns: 100 * SECOND,
                pending,
                completed: vec![id(completed)],
                ..Heartbeat::default()
            },
            stalled_for: Duration::from_secs(10),
            silent_for: Duration::ZERO,
        }
    }

    #[test]
    fn the_missing_rank_is_named() {
        let ranks = [
            status(0, vec![pending(9, 90 * SECOND)], 8),
            status(1, vec![], 8),
            status(2, vec![pending(9, 91 * SECOND)], 8),
        ];
        let hangs = diagnose(&ranks);
        assert_eq!(hangs.len(), 1);
        assert_eq!(
            hangs[0].to_string(),
            "rank 1 did not enter all_gather 9 of dp_shard (parameter); it is in step 7, and ranks 0, 2 have \
             waited for 10.0 s"
        );
    }

    #[test]
    fn a_stopped_process_is_distinguished_from_a_slow_one() {
        let mut stopped = status(1, vec![], 8);
        stopped.silent_for = Duration::from_secs(10);
        let hangs = diagnose(&[status(0, vec![pending(9, 90 * SECOND)], 8), stopped]);
        assert!(
            matches!(hangs[0], Hang::Frozen { rank: 1, .. }),
            "{hangs:?}"
        );
        assert!(
            matches!(hangs[1], Hang::Missing { rank: 1, .. }),
            "{hangs:?}"
        );
    }

    #[test]
    fn extreme_durations_do_not_overflow() {
        let mut absurd = status(1, vec![pending(9, 0)], 8);
        (absurd.silent_for, absurd.stalled_for) = (Duration::MAX, Duration::MAX);
        let hangs = diagnose(&[absurd, status(0, vec![], 8)]);
        assert!(hangs.iter().all(|hang| !hang.to_string().is_empty()));
    }

    #[test]
    fn a_rank_that_completed_the_collective_is_not_missing() {
        let hangs = diagnose(&[
            status(0, vec![pending(9, 90 * SECOND)], 8),
            status(1, vec![], 9),
            status(2, vec![pending(9, 91 * SECOND)], 8),
        ]);
        assert!(matches!(hangs[..], [Hang::Stuck { .. }]), "{hangs:?}");
    }

    #[test]
    fn a_rank_that_computes_forever_is_named() {
        let mut late = status(1, vec![], 8);
        late.stalled_for = Duration::from_secs(100);
        let hangs = diagnose(&[status(0, vec![], 8), late]);
        assert!(
            matches!(hangs[..], [Hang::Stalled { rank: 1, .. }]),
            "{hangs:?}"
        );
    }

    #[test]
    fn an_overlapped_collective_holds_up_no_rank() {
        let mut overlapped = pending(9, 90 * SECOND);
        overlapped.is_blocking = false;
        let hangs = diagnose(&[status(0, vec![overlapped], 8)]);
        assert!(
            matches!(hangs[..], [Hang::Stalled { rank: 0, .. }]),
            "{hangs:?}"
        );
    }
}

//! Hang diagnosis: which rank and which collective hold up a job, from the status of its ranks.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::in_flight::{CollectiveInFlight, collectives_in_flight};
use crate::{Heartbeat, Stage};

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
    /// Whether the rank's process does not run.
    pub fn is_frozen(&self) -> bool {
        self.silent_for >= FROZEN_AFTER && self.heartbeat.stage != Stage::Ended
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
        /// The line of the program at which it is, if it is known.
        position: Option<String>,
        /// The collective in which the others wait.
        collective: CollectiveInFlight,
    },
    /// All known ranks have entered a collective that does not complete: the missing rank is on another node, or a
    /// connection is broken.
    Stuck {
        /// The collective.
        collective: CollectiveInFlight,
    },
    /// A rank waits in no collective and does not finish its step.
    Stalled {
        /// The rank.
        rank: usize,
        /// Its current step.
        step: u64,
        /// The line of the program at which it is, if it is known.
        position: Option<String>,
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
        Some(collective) => hangs.extend(diagnose_collective(collective, ranks)),
        None => hangs.extend(longest_stalled(ranks)),
    }
    hangs
}

/// The collective in which a rank has waited longest: it holds up all others.
fn longest_wait(ranks: &[RankStatus]) -> Option<CollectiveInFlight> {
    let in_flight = collectives_in_flight(ranks).into_iter();
    in_flight
        .filter(|collective| collective.blocked_for.is_some())
        .max_by_key(|collective| collective.blocked_for)
}

/// The ranks that are missing from a collective. If none is missing, the collective is stuck.
fn diagnose_collective(collective: CollectiveInFlight, ranks: &[RankStatus]) -> Vec<Hang> {
    let missing = ranks.iter().map(|status| &status.heartbeat);
    let missing = missing.filter(|heartbeat| collective.missing.contains(&heartbeat.rank));
    let hangs: Vec<Hang> = missing
        .map(|heartbeat| Hang::Missing {
            rank: heartbeat.rank,
            step: heartbeat.step,
            position: heartbeat.position.clone(),
            collective: collective.clone(),
        })
        .collect();
    match hangs[..] {
        [] => vec![Hang::Stuck { collective }],
        _ => hangs,
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
            position: status.heartbeat.position.clone(),
            stalled_for: status.stalled_for,
        })
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
                position,
                collective,
            } => write!(
                f,
                "rank {rank} did not enter {collective}; it is in step {step}{}, and {}",
                at(position),
                have_waited(collective, "")
            ),
            Hang::Stuck { collective } => write!(
                f,
                "{collective} does not complete; {}",
                have_waited(collective, " in it")
            ),
            Hang::Stalled {
                rank,
                step,
                position,
                stalled_for,
            } => write!(
                f,
                "rank {rank} waits in no collective and has been in step {step} for {}{}",
                seconds(stalled_for),
                at(position)
            ),
        }
    }
}

fn at(position: &Option<String>) -> String {
    let position = position.as_ref();
    position.map_or_else(String::new, |position| format!(", at {position}"))
}

/// Which ranks have waited in a collective, and how long.
fn have_waited(collective: &CollectiveInFlight, place: &str) -> String {
    let ranks = match &collective.entered[..] {
        [] => "other ranks have".to_owned(),
        [rank] => format!("rank {rank} has"),
        [first, .., last] if collective.entered.len() > 4 => {
            format!(
                "{} ranks from {first} to {last} have",
                collective.entered.len()
            )
        }
        few => {
            let ranks: Vec<String> = few.iter().map(usize::to_string).collect();
            format!("ranks {} have", ranks.join(", "))
        }
    };
    let waited = collective.blocked_for.unwrap_or(collective.age);
    format!("{ranks} waited{place} for {}", seconds(&waited))
}

fn seconds(time: &Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PendingCollective;
    use trainyard_trace::{CollectiveId, CollectiveKind, Purpose};

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
            shapes: Vec::new(),
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
    fn shapes_and_the_line_of_the_program_are_named_if_they_are_known() {
        let mut waiting = pending(9, 90 * SECOND);
        waiting.shapes = vec![vec![128, 64], vec![64]];
        let mut late = status(1, vec![], 8);
        late.heartbeat.position = Some("train.py:41 in load".to_owned());
        let hangs = diagnose(&[status(0, vec![waiting], 8), late.clone()]);
        assert_eq!(
            hangs[0].to_string(),
            "rank 1 did not enter all_gather 9 of dp_shard (parameter) of shape [128, 64] and [64]; it is in step 7, at \
             train.py:41 in load, and rank 0 has waited for 10.0 s"
        );
        assert_eq!(
            diagnose(&[late])[0].to_string(),
            "rank 1 waits in no collective and has been in step 7 for 10.0 s, at train.py:41 in load"
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

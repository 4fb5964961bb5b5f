//! Who keeps whom waiting, from what was seen of all ranks.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Entered, Pulse, Stage, Which};

/// A pulse is written several times a second; a process whose pulse has not changed for so long does not run.
const FROZEN: Duration = Duration::from_secs(2);

/// A rank as somebody who looks again and again sees it. How long nothing changed is counted by whoever
/// looks, so no two clocks are compared.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Sighting {
    /// What it wrote last.
    pub pulse: Pulse,
    /// For how long its loop has not got on.
    pub stalled: Duration,
    /// For how long it has written nothing new.
    pub silent: Duration,
}

impl Sighting {
    fn is_frozen(&self) -> bool {
        self.silent >= FROZEN && self.pulse.stage != Stage::Ended
    }

    fn lasted(&self, entered: &Entered) -> Duration {
        // Of other machines one reads what somebody wrote.
        self.pulse.ago(entered.since_ns).saturating_add(self.silent)
    }
}

/// What keeps a job from getting on.
#[derive(Clone, Debug, PartialEq)]
pub enum Hang {
    /// A process that does not run: stopped, or starved.
    Frozen {
        /// Which rank.
        rank: usize,
        /// The step it was in.
        step: u64,
        /// For how long nothing was heard of it.
        silent: Duration,
    },
    /// A rank that has not come to a collective which others stand in.
    Missing {
        /// Which rank.
        rank: usize,
        /// The step it is in.
        step: u64,
        /// Where the others are.
        at: Which,
        /// The others.
        waiting: Vec<usize>,
        /// For how long the first of them has been there.
        waited: Duration,
    },
    /// Nobody who was seen is missing, and it does not end: who is missing is elsewhere, or a connection is
    /// broken.
    Stuck {
        /// Where.
        at: Which,
        /// Who is there.
        waiting: Vec<usize>,
        /// For how long the first of them has been there.
        waited: Duration,
    },
    /// A rank that stands in no collective and does not end its step.
    Slow {
        /// Which rank.
        rank: usize,
        /// The step it is in.
        step: u64,
        /// For how long.
        lasted: Duration,
    },
}

/// What keeps these ranks from getting on, the likeliest cause first. Empty if there is nobody.
pub fn diagnose(seen: &[Sighting]) -> Vec<Hang> {
    let frozen = seen.iter().filter(|one| one.is_frozen());
    let mut found: Vec<Hang> = frozen
        .map(|one| Hang::Frozen {
            rank: one.pulse.rank,
            step: one.pulse.step,
            silent: one.silent,
        })
        .collect();
    match oldest(seen) {
        Some((at, waited)) => found.extend(around(at, waited, seen)),
        None => found.extend(slowest(seen)),
    }
    found
}

/// The collective that somebody has waited in for longest: it holds up the rest.
fn oldest(seen: &[Sighting]) -> Option<(&Entered, Duration)> {
    let all = seen.iter().flat_map(|one| {
        let waited = one.pulse.entered.iter().filter(|entered| entered.waits);
        waited.map(move |entered| (entered, one.lasted(entered)))
    });
    all.max_by_key(|(_, lasted)| *lasted)
}

/// Who is missing from a collective; if nobody is, it is stuck.
fn around(at: &Entered, waited: Duration, seen: &[Sighting]) -> Vec<Hang> {
    let pulses = || seen.iter().map(|one| &one.pulse);
    let stands = |pulse: &Pulse| pulse.entered.iter().any(|entered| is_same(entered, at));
    let waiting: Vec<usize> = pulses().filter(|p| stands(p)).map(|p| p.rank).collect();
    let has_passed = |pulse: &Pulse| {
        let of_group = |which: &&Which| which.group == at.which.group;
        let passed = pulse.passed.iter().filter(of_group);
        passed.map(|passed| passed.sequence).max() >= Some(at.which.sequence)
    };
    // Of a message it is not known whom it is from.
    let members = pulses()
        .filter(|pulse| at.members.contains(&pulse.rank) && pulse.stage != Stage::Ended)
        .filter(|_| !at.which.kind.is_message());
    let missing: Vec<Hang> = members
        .filter(|pulse| !stands(pulse) && !has_passed(pulse))
        .map(|pulse| Hang::Missing {
            rank: pulse.rank,
            step: pulse.step,
            at: at.which.clone(),
            waiting: waiting.clone(),
            waited,
        })
        .collect();
    match missing.is_empty() {
        true => vec![Hang::Stuck {
            at: at.which.clone(),
            waiting,
            waited,
        }],
        false => missing,
    }
}

fn slowest(seen: &[Sighting]) -> Option<Hang> {
    let running = seen.iter().filter(|one| one.pulse.stage != Stage::Ended);
    running.max_by_key(|one| one.stalled).map(|one| Hang::Slow {
        rank: one.pulse.rank,
        step: one.pulse.step,
        lasted: one.stalled,
    })
}

/// Messages have numbers of each rank's own, so a message is only what it is itself.
fn is_same(a: &Entered, b: &Entered) -> bool {
    match a.which.kind.is_message() || b.which.kind.is_message() {
        true => a == b,
        false => {
            let place = |entered: &Entered| (entered.which.sequence, entered.which.group.clone());
            place(a) == place(b) && a.members == b.members
        }
    }
}

impl Hang {
    /// Whom it is about, if it is about one rank.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Hang::Frozen { rank, .. } | Hang::Missing { rank, .. } | Hang::Slow { rank, .. } => {
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
            Hang::Frozen { rank, step, silent } => write!(
                f,
                "rank {rank} does not run: stopped or starved for {} in step {step}",
                seconds(silent)
            ),
            Hang::Missing {
                rank,
                step,
                at,
                waiting,
                waited,
            } => write!(
                f,
                "rank {rank} never entered {at}; it is in step {step}, and {} for {}",
                who_waits(waiting),
                seconds(waited)
            ),
            Hang::Stuck {
                at,
                waiting,
                waited,
            } => write!(
                f,
                "{at} does not end; {} in it for {}",
                who_waits(waiting),
                seconds(waited)
            ),
            Hang::Slow { rank, step, lasted } => write!(
                f,
                "rank {rank} waits for nobody and has been in step {step} for {}",
                seconds(lasted)
            ),
        }
    }
}

fn who_waits(ranks: &[usize]) -> String {
    match ranks {
        [] => "others wait".to_owned(),
        [rank] => format!("rank {rank} waits"),
        [first, .., last] if ranks.len() > 4 => {
            format!("{} ranks from {first} to {last} wait", ranks.len())
        }
        _ => {
            let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
            format!("ranks {} wait", ranks.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CollectiveKind, Purpose};

    const SECOND: u64 = 1_000_000_000;

    fn which(sequence: u64) -> Which {
        Which {
            kind: CollectiveKind::AllGather,
            purpose: Purpose::Parameter,
            group: "dp_shard".to_owned(),
            sequence,
        }
    }

    fn entered(sequence: u64, since_ns: u64) -> Entered {
        Entered {
            which: which(sequence),
            members: vec![0, 1, 2],
            since_ns,
            waits: true,
        }
    }

    fn seen(rank: usize, entered: Vec<Entered>, passed: u64) -> Sighting {
        Sighting {
            pulse: Pulse {
                rank,
                stage: Stage::Stepping,
                step: 7,
                since_ns: SECOND,
                written_ns: 100 * SECOND,
                entered,
                passed: vec![which(passed)],
                ..Pulse::default()
            },
            stalled: Duration::from_secs(10),
            silent: Duration::ZERO,
        }
    }

    #[test]
    fn the_rank_that_never_came_is_named() {
        let seen = [
            seen(0, vec![entered(9, 90 * SECOND)], 8),
            seen(1, vec![], 8),
            seen(2, vec![entered(9, 91 * SECOND)], 8),
        ];
        let found = diagnose(&seen);
        assert_eq!(found.len(), 1);
        assert_eq!(
            found[0].to_string(),
            "rank 1 never entered all_gather 9 of dp_shard (parameter); it is in step 7, and ranks 0, 2 wait \
             for 10.0 s"
        );
    }

    #[test]
    fn a_stopped_process_is_told_from_a_slow_one() {
        let mut stopped = seen(1, vec![], 8);
        stopped.silent = Duration::from_secs(10);
        let found = diagnose(&[seen(0, vec![entered(9, 90 * SECOND)], 8), stopped]);
        assert!(
            matches!(found[0], Hang::Frozen { rank: 1, .. }),
            "{found:?}"
        );
        assert!(
            matches!(found[1], Hang::Missing { rank: 1, .. }),
            "{found:?}"
        );
    }

    #[test]
    fn times_beyond_all_reason_are_borne() {
        let mut absurd = seen(1, vec![entered(9, 0)], 8);
        (absurd.silent, absurd.stalled) = (Duration::MAX, Duration::MAX);
        let words = diagnose(&[absurd, seen(0, vec![], 8)]);
        assert!(words.iter().all(|hang| !hang.to_string().is_empty()));
    }

    #[test]
    fn who_has_passed_is_not_missing() {
        let found = diagnose(&[
            seen(0, vec![entered(9, 90 * SECOND)], 8),
            seen(1, vec![], 9),
            seen(2, vec![entered(9, 91 * SECOND)], 8),
        ]);
        assert!(matches!(found[..], [Hang::Stuck { .. }]), "{found:?}");
    }

    #[test]
    fn a_rank_that_computes_for_ever_is_named() {
        let mut late = seen(1, vec![], 8);
        late.stalled = Duration::from_secs(100);
        let found = diagnose(&[seen(0, vec![], 8), late]);
        assert!(
            matches!(found[..], [Hang::Slow { rank: 1, .. }]),
            "{found:?}"
        );
    }

    #[test]
    fn a_collective_that_only_runs_beside_the_work_holds_nobody_up() {
        let mut beside = entered(9, 90 * SECOND);
        beside.waits = false;
        let found = diagnose(&[seen(0, vec![beside], 8)]);
        assert!(
            matches!(found[..], [Hang::Slow { rank: 0, .. }]),
            "{found:?}"
        );
    }
}

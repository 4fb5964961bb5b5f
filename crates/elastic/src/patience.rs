//! The decision who hangs: how long a rank may take, and which of those that took longer is to blame.

use std::time::Duration;

use trainyard_trace::{Hang, Pulse, Sighting, Stage, diagnose};

/// A hang is found within five seconds, or three times what nearly all steps take. It is called sooner,
/// because pulses are written and read in turns, and on a busy machine late.
const LEAST: Duration = Duration::from_secs(4);
const TIMES: f64 = 2.8;

/// A process that does not run at all is called sooner: by then a new start would have cost less than waiting.
const LEAST_SILENCE: Duration = Duration::from_secs(3);

/// A process that writes no pulse for so long does not run, whatever it is at.
const LONGEST_SILENCE: Duration = Duration::from_secs(30);

/// Who waits in a collective is hardly ever to blame: those who are have so much longer to be found, by
/// this agent or by another.
const BENEFIT_OF_DOUBT: Duration = Duration::from_secs(10);

/// How long ranks may take.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For what has no steps to learn from: starting, saving, evaluating.
    pub otherwise: Duration,
}

/// A rank that hangs, and why one thinks so.
#[derive(Clone, Debug, PartialEq)]
pub struct Blame {
    /// Which rank.
    pub rank: usize,
    /// In words.
    pub why: String,
}

impl Patience {
    /// How long a rank may be at what it is at: learned from its steps, if it steps and there were enough.
    pub fn allows(&self, pulse: &Pulse) -> Duration {
        match (pulse.stage, pulse.p99_ns.map(|p99| limit(p99, LEAST))) {
            (Stage::Stepping, Some(limit)) => limit,
            (Stage::Ended, _) => Duration::MAX,
            _ => self.otherwise,
        }
    }

    /// Which of these ranks, all of one machine, hang and are to blame; `all` are those of other machines
    /// too, as far as they are known, for the words.
    ///
    /// When one rank hangs all stand still. A process that does not run is to blame before one that runs,
    /// one that computes before those that wait for it in a collective; those only when nobody else
    /// was found for long.
    pub fn blame(&self, own: &[Sighting], all: &[Sighting]) -> Vec<Blame> {
        let allows = |seen: &Sighting| self.allows(&seen.pulse);
        // A pulse does not wait for a step to end, so a single step is enough to know when it is late.
        let is_frozen = |seen: &Sighting| {
            let steps = seen.pulse.p99_ns.or(seen.pulse.longest_ns);
            let limit = steps.map_or(LONGEST_SILENCE, |steps| limit(steps, LEAST_SILENCE));
            seen.silent >= limit.min(LONGEST_SILENCE)
        };
        let computes = |seen: &Sighting| !seen.pulse.waits() && seen.stalled >= allows(seen);
        let waits = |seen: &Sighting| {
            let allowed = allows(seen).saturating_mul(2);
            seen.pulse.waits() && seen.stalled >= allowed.saturating_add(BENEFIT_OF_DOUBT)
        };
        let suspicions: [&dyn Fn(&Sighting) -> bool; 3] = [&is_frozen, &computes, &waits];
        let found = suspicions.into_iter().find_map(|suspicion| {
            let found: Vec<usize> = own
                .iter()
                .filter(|seen| seen.pulse.stage != Stage::Ended && suspicion(seen))
                .map(|seen| seen.pulse.rank)
                .collect();
            (!found.is_empty()).then_some(found)
        });
        let Some(found) = found else {
            return Vec::new(); // as nearly always: no words are needed
        };
        let words = words(all);
        let blame = |rank| Blame {
            rank,
            why: words(rank),
        };
        found.into_iter().map(blame).collect()
    }
}

/// How long a step may take where nearly all take so many nanoseconds, and at least so long.
fn limit(nearly_all: u64, least: Duration) -> Duration {
    let nearly_all = Duration::from_nanos(nearly_all);
    nearly_all.mul_f64(TIMES).max(least)
}

/// What there is to say of a rank; of one who is not to be seen at fault, what there is to say at all.
fn words(all: &[Sighting]) -> impl Fn(usize) -> String {
    let hangs = diagnose(all);
    move |rank| {
        let own: Vec<String> = hangs
            .iter()
            .filter(|hang| hang.rank() == Some(rank))
            .map(Hang::to_string)
            .collect();
        let any = || hangs.first().map(Hang::to_string).unwrap_or_default();
        match own.is_empty() {
            true => any(),
            false => own.join("; "),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use trainyard_trace::{CollectiveKind, Entered, Purpose, Which};

    use super::*;

    const PATIENCE: Patience = Patience {
        otherwise: Duration::from_secs(1800),
    };
    const SECOND: Duration = Duration::from_secs(1);
    const NOBODY: [usize; 0] = [];

    fn seen(rank: usize, p99: Option<Duration>, stalled: Duration) -> Sighting {
        Sighting {
            pulse: Pulse {
                rank,
                stage: Stage::Stepping,
                p99_ns: p99.map(|p99| p99.as_nanos() as u64),
                ..Pulse::default()
            },
            stalled,
            silent: Duration::ZERO,
        }
    }

    fn waiting(mut seen: Sighting) -> Sighting {
        seen.pulse.entered.push(Entered {
            which: Which {
                kind: CollectiveKind::AllReduce,
                purpose: Purpose::Gradient,
                group: "dp_shard".to_owned(),
                sequence: 4,
            },
            members: vec![0, 1],
            since_ns: 0,
            waits: true,
        });
        seen
    }

    fn blamed(seen: &[Sighting]) -> Vec<usize> {
        let blamed = PATIENCE.blame(seen, seen);
        blamed.into_iter().map(|blame| blame.rank).collect()
    }

    #[test]
    fn who_waits_is_not_to_blame_for_who_does_not_come() {
        let step = Some(SECOND / 10);
        let one = [
            waiting(seen(0, step, 6 * SECOND)),
            seen(1, step, 6 * SECOND),
        ];
        assert_eq!(blamed(&one), [1]);
        let words = &PATIENCE.blame(&one, &one)[0].why;
        assert!(
            words.starts_with("rank 1 never entered all_reduce 4 of dp_shard (gradient)"),
            "{words}"
        );
        assert_eq!(blamed(&one[..1]), NOBODY, "who is to blame is elsewhere");
        let long = [waiting(seen(0, step, 20 * SECOND))];
        assert_eq!(blamed(&long), [0], "nobody was found for long");
    }

    #[test]
    fn a_stopped_process_is_to_blame_before_all_others() {
        let step = Some(SECOND / 10);
        let mut stopped = waiting(seen(0, step, 6 * SECOND));
        stopped.silent = 6 * SECOND;
        let others = [stopped, seen(1, step, 6 * SECOND)];
        assert_eq!(blamed(&others), [0]);
    }

    #[test]
    fn a_stopped_process_is_found_before_a_slow_step() {
        let mut one = seen(0, Some(SECOND / 10), 7 * SECOND / 2);
        assert_eq!(blamed(&[one.clone()]), NOBODY, "it computes");
        one.silent = 7 * SECOND / 2;
        assert_eq!(blamed(&[one.clone()]), [0]);
        one.pulse.p99_ns = Some(2_000_000_000);
        assert_eq!(blamed(&[one]), NOBODY, "two steps may take as long");
    }

    #[test]
    fn what_is_no_step_may_take_long() {
        let mut saving = seen(0, Some(SECOND / 10), 600 * SECOND);
        saving.pulse.stage = Stage::Between;
        assert_eq!(blamed(&[saving.clone()]), NOBODY);
        saving.silent = 6 * SECOND;
        assert_eq!(blamed(&[saving]), [0], "but it must run");
        let mut first = seen(0, None, 600 * SECOND);
        first.silent = 6 * SECOND;
        assert_eq!(blamed(&[first.clone()]), NOBODY, "a first step");
        first.pulse.longest_ns = Some(1_000_000_000);
        assert_eq!(blamed(&[first]), [0], "a second one, by its silence alone");
        let mut ended = seen(0, None, Duration::MAX);
        (ended.pulse.stage, ended.silent) = (Stage::Ended, Duration::MAX);
        assert_eq!(blamed(&[ended]), NOBODY);
    }

    proptest! {
        /// A step of two and a half times what 99 of 100 took is no hang, though it is seen to be longer by
        /// two looks; one of three times, or of five seconds, is one, though it is seen to be shorter.
        #[test]
        fn slow_is_not_hung(p99_ms in 1u64..60_000) {
            let p99 = Duration::from_millis(p99_ms);
            let looks = 2 * crate::vigil::LOOK;
            let slow = seen(0, Some(p99), p99 * 5 / 2 + looks);
            prop_assert!(blamed(&[slow]).is_empty());
            let hung = seen(0, Some(p99), (3 * p99).max(5 * SECOND) - looks);
            prop_assert_eq!(blamed(&[hung]).len(), 1);
        }
    }
}

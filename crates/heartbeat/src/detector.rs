//! Hang detection: how long a rank may take, and which of the ranks that took longer caused the hang.

use std::time::Duration;

use crate::{Hang, Heartbeat, RankStatus, Stage, diagnose};

/// A hang is reported within five seconds or three times the p99 step time, whichever is longer. The limits here are
/// lower, because heartbeats are written and read periodically, and late on a busy node.
const MIN_TIMEOUT: Duration = Duration::from_secs(4);
const P99_FACTOR: f64 = 2.8;

/// A process that does not run at all is reported sooner: after this time a restart costs less than waiting.
const MIN_SILENCE: Duration = Duration::from_secs(3);

/// A process that writes no heartbeat for this long does not run, whatever its stage.
const MAX_SILENCE: Duration = Duration::from_secs(30);

/// A rank that waits in a collective is rarely the cause. Agents get this much additional time to find the rank that
/// is.
const WAITING_GRACE: Duration = Duration::from_secs(10);

/// Decides which ranks hang.
#[derive(Clone, Copy, Debug)]
pub struct HangDetector {
    /// The limit for stages without a learned step time: starting, saving, evaluating.
    pub default_timeout: Duration,
}

/// A rank that hangs.
#[derive(Clone, Debug, PartialEq)]
pub struct HungRank {
    /// The rank.
    pub rank: usize,
    /// The diagnosis, as text.
    pub reason: String,
}

impl HangDetector {
    /// How long a rank may stay in its current stage and step: learned from its step times once there are enough.
    pub fn timeout_for(&self, heartbeat: &Heartbeat) -> Duration {
        match (
            heartbeat.stage,
            heartbeat.p99_step_ns.map(|p99| limit(p99, MIN_TIMEOUT)),
        ) {
            (Stage::Stepping, Some(limit)) => limit,
            (Stage::Ended, _) => Duration::MAX,
            _ => self.default_timeout,
        }
    }

    /// How long a rank may write no heartbeat.
    fn max_silence(&self, status: &RankStatus) -> Duration {
        // An observer inside a Python process is silent while a call holds the interpreter's lock.
        if status.heartbeat.stage == Stage::Observed {
            return self.default_timeout;
        }
        let steps = status.heartbeat.usual_step_ns();
        let limit = steps.map_or(MAX_SILENCE, |steps| limit(steps, MIN_SILENCE));
        limit.min(MAX_SILENCE)
    }

    /// The ranks of this node that hang and caused the hang. `all` also has the known ranks of other nodes; it is
    /// only used to describe the hang.
    ///
    /// When one rank hangs, all ranks stall. The cause is a process that does not run; failing that, a rank that
    /// computes. Ranks that wait in a collective are suspected only if no other rank was found for a long time.
    pub fn hung_ranks(&self, local: &[RankStatus], all: &[RankStatus]) -> Vec<HungRank> {
        let timeout_for = |status: &RankStatus| self.timeout_for(&status.heartbeat);
        // Heartbeats do not depend on step times, so a single step is enough to estimate when one is late.
        let is_frozen = |status: &RankStatus| status.silent_for >= self.max_silence(status);
        let is_stalled = |status: &RankStatus| {
            !status.heartbeat.is_blocked() && status.stalled_for >= timeout_for(status)
        };
        let is_stuck = |status: &RankStatus| {
            let limit = timeout_for(status).saturating_mul(2);
            status.heartbeat.is_blocked()
                && status.stalled_for >= limit.saturating_add(WAITING_GRACE)
        };
        let suspicions: [&dyn Fn(&RankStatus) -> bool; 3] = [&is_frozen, &is_stalled, &is_stuck];
        let hung = suspicions.into_iter().find_map(|suspicion| {
            let hung: Vec<usize> = local
                .iter()
                .filter(|status| status.heartbeat.stage != Stage::Ended && suspicion(status))
                .map(|status| status.heartbeat.rank)
                .collect();
            (!hung.is_empty()).then_some(hung)
        });
        let Some(hung) = hung else {
            return Vec::new(); // the usual case: skip the diagnosis
        };
        let reason = reasons(all);
        let hung_rank = |rank| HungRank {
            rank,
            reason: reason(rank),
        };
        hung.into_iter().map(hung_rank).collect()
    }
}

/// What holds up ranks whose [programs do not say](Stage::Observed) whether they are in a step, if one of them takes longer
/// than its steps take. It may evaluate or save, so this is reason for a warning only; the hang detector waits longer.
pub fn slow_progress(local: &[RankStatus], all: &[RankStatus]) -> Option<String> {
    let hangs = || diagnose(all).into_iter().map(|hang| hang.to_string());
    is_progress_slow(local).then(|| hangs().collect::<Vec<String>>().join("; "))
}

/// Whether there is [slow progress](slow_progress), without the diagnosis, which takes longer.
pub fn is_progress_slow(local: &[RankStatus]) -> bool {
    local.iter().any(|status| {
        let steps = status.heartbeat.usual_step_ns();
        status.heartbeat.stage == Stage::Observed
            && steps.is_some_and(|steps| status.stalled_for >= limit(steps, MIN_TIMEOUT))
    })
}

/// The longest time a step may take, given its p99 in nanoseconds, but at least `min`.
fn limit(p99_ns: u64, min: Duration) -> Duration {
    Duration::from_nanos(p99_ns).mul_f64(P99_FACTOR).max(min)
}

/// The diagnosis for a rank; if the diagnosis does not mention it, the likeliest cause of the hang.
fn reasons(all: &[RankStatus]) -> impl Fn(usize) -> String {
    let hangs = diagnose(all);
    move |rank| {
        let own: Vec<String> = hangs
            .iter()
            .filter(|hang| hang.rank() == Some(rank))
            .map(Hang::to_string)
            .collect();
        let any = || hangs.first().map(Hang::to_string).unwrap_or_default();
        if own.is_empty() {
            any()
        } else {
            own.join("; ")
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use trainyard_trace::{CollectiveId, CollectiveKind, Purpose};

    use super::*;
    use crate::PendingCollective;

    const DETECTOR: HangDetector = HangDetector {
        default_timeout: Duration::from_secs(1800),
    };
    const SECOND: Duration = Duration::from_secs(1);
    const NONE: [usize; 0] = [];

    fn status(rank: usize, p99: Option<Duration>, stalled_for: Duration) -> RankStatus {
        RankStatus {
            heartbeat: Heartbeat {
                rank,
                stage: Stage::Stepping,
                p99_step_ns: p99.map(|p99| p99.as_nanos() as u64),
                ..Heartbeat::default()
            },
            stalled_for,
            silent_for: Duration::ZERO,
        }
    }

    fn waiting(mut status: RankStatus) -> RankStatus {
        status.heartbeat.pending.push(PendingCollective {
            id: CollectiveId {
                kind: CollectiveKind::AllReduce,
                purpose: Purpose::Gradient,
                group: "dp_shard".to_owned(),
                sequence: 4,
            },
            members: vec![0, 1],
            since_ns: 0,
            is_blocking: true,
            shapes: Vec::new(),
        });
        status
    }

    fn hung(ranks: &[RankStatus]) -> Vec<usize> {
        let hung = DETECTOR.hung_ranks(ranks, ranks);
        hung.into_iter().map(|hung| hung.rank).collect()
    }

    #[test]
    fn the_missing_rank_hangs_not_the_ranks_that_wait_for_it() {
        let step = Some(SECOND / 10);
        let ranks = [
            waiting(status(0, step, 6 * SECOND)),
            status(1, step, 6 * SECOND),
        ];
        assert_eq!(hung(&ranks), [1]);
        let reason = &DETECTOR.hung_ranks(&ranks, &ranks)[0].reason;
        assert!(
            reason.starts_with("rank 1 did not enter all_reduce 4 of dp_shard (gradient)"),
            "{reason}"
        );
        assert_eq!(hung(&ranks[..1]), NONE, "the cause is on another node");
        let long = [waiting(status(0, step, 20 * SECOND))];
        assert_eq!(hung(&long), [0], "no other rank was found for a long time");
    }

    #[test]
    fn a_stopped_process_is_suspected_first() {
        let step = Some(SECOND / 10);
        let mut stopped = waiting(status(0, step, 6 * SECOND));
        stopped.silent_for = 6 * SECOND;
        let ranks = [stopped, status(1, step, 6 * SECOND)];
        assert_eq!(hung(&ranks), [0]);
    }

    #[test]
    fn a_stopped_process_is_found_before_a_slow_step() {
        let mut rank = status(0, Some(SECOND / 10), 7 * SECOND / 2);
        assert_eq!(hung(&[rank.clone()]), NONE, "it computes");
        rank.silent_for = 7 * SECOND / 2;
        assert_eq!(hung(&[rank.clone()]), [0]);
        rank.heartbeat.p99_step_ns = Some(2_000_000_000);
        assert_eq!(hung(&[rank]), NONE, "two steps may take as long");
    }

    #[test]
    fn stages_other_than_steps_have_the_default_timeout() {
        let mut saving = status(0, Some(SECOND / 10), 600 * SECOND);
        saving.heartbeat.stage = Stage::Between;
        assert_eq!(hung(&[saving.clone()]), NONE);
        saving.silent_for = 6 * SECOND;
        assert_eq!(hung(&[saving]), [0], "but its process must run");
        let mut first = status(0, None, 600 * SECOND);
        first.silent_for = 6 * SECOND;
        assert_eq!(hung(&[first.clone()]), NONE, "in its first step");
        first.heartbeat.max_step_ns = Some(1_000_000_000);
        assert_eq!(
            hung(&[first]),
            [0],
            "in its second step, because it is silent"
        );
        let mut ended = status(0, None, Duration::MAX);
        (ended.heartbeat.stage, ended.silent_for) = (Stage::Ended, Duration::MAX);
        assert_eq!(hung(&[ended]), NONE);
    }

    #[test]
    fn a_program_that_does_not_say_whether_it_is_in_a_step_gets_a_warning_first() {
        let step = Some(SECOND / 10);
        let mut ranks = [
            waiting(status(0, step, 6 * SECOND)),
            status(1, step, 6 * SECOND),
        ];
        for status in &mut ranks {
            status.heartbeat.stage = Stage::Observed;
        }
        ranks[1].silent_for = 6 * SECOND;
        assert_eq!(hung(&ranks), NONE);
        let warning = slow_progress(&ranks, &ranks);
        assert!(warning.is_some_and(|text| text.contains("rank 1 did not enter")));
        for status in &mut ranks {
            status.stalled_for = DETECTOR.default_timeout;
        }
        assert_eq!(hung(&ranks), [1]);
        let mut quick = ranks[1].clone();
        quick.stalled_for = SECOND;
        assert_eq!(slow_progress(&[quick.clone()], &[quick]), None);
    }

    proptest! {
        /// A step of 2.5 times the p99 is not a hang, even if polling makes it look longer by two intervals. A step
        /// of three times the p99, or of five seconds, is one, even if polling makes it look shorter.
        #[test]
        fn slow_is_not_hung(p99_ms in 1u64..60_000) {
            let p99 = Duration::from_millis(p99_ms);
            let polls = 2 * crate::POLL_INTERVAL;
            let slow = status(0, Some(p99), p99 * 5 / 2 + polls);
            prop_assert!(hung(&[slow]).is_empty());
            let stalled = status(0, Some(p99), (3 * p99).max(5 * SECOND) - polls);
            prop_assert_eq!(hung(&[stalled]).len(), 1);
        }
    }
}

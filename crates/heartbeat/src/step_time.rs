//! Step-time statistics of a rank: the 99th percentile, and the fraction of a step spent on its own work.

use std::collections::VecDeque;
use std::time::Duration;

/// How many of the last steps are kept.
const WINDOW: usize = 512;

/// Statistics need this many steps: the first steps of a process are not representative.
const MIN_STEPS: usize = 5;

/// How many of the last steps the busy fraction covers.
const RECENT: usize = 16;

/// Times of a rank's last steps.
#[derive(Clone, Debug, Default)]
pub struct StepTimeStats {
    steps: VecDeque<Step>,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    took: Duration,
    waited: Duration,
}

impl StepTimeStats {
    /// Records how long a step took, and how much of it the rank spent waiting for other ranks.
    pub fn record(&mut self, took: Duration, waited: Duration) {
        if self.steps.len() == WINDOW {
            self.steps.pop_front();
        }
        let waited = waited.min(took);
        self.steps.push_back(Step { took, waited });
    }

    /// The 99th percentile of step times. `None` until there are enough steps.
    pub fn p99(&self) -> Option<Duration> {
        if self.steps.len() < MIN_STEPS {
            return None;
        }
        let mut steps: Vec<Duration> = self.steps.iter().map(|step| step.took).collect();
        let index = (steps.len() * 99).div_ceil(100) - 1;
        let (_, p99, _) = steps.select_nth_unstable(index);
        Some(*p99)
    }

    /// The longest step, until there are enough steps for a [99th percentile](Self::p99).
    pub fn early_max(&self) -> Option<Duration> {
        let first = self.steps.iter().take(MIN_STEPS);
        let longest = first.map(|step| step.took).max();
        longest.filter(|_| self.steps.len() < MIN_STEPS)
    }

    /// The fraction of recent step time in which this rank did not wait for other ranks.
    pub fn busy_fraction(&self) -> Option<f64> {
        if self.steps.len() < MIN_STEPS {
            return None;
        }
        let recent = || self.steps.iter().rev().take(RECENT);
        let took: Duration = recent().map(|step| step.took).sum();
        let waited: Duration = recent().map(|step| step.waited).sum();
        Some(1.0 - waited.as_secs_f64() / took.as_secs_f64().max(f64::MIN_POSITIVE))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stats(millis: &[u64]) -> StepTimeStats {
        let mut stats = StepTimeStats::default();
        for millis in millis {
            stats.record(Duration::from_millis(*millis), Duration::ZERO);
        }
        stats
    }

    #[test]
    fn the_p99_needs_five_steps() {
        let few = stats(&[9000, 20, 20, 20]);
        assert_eq!(few.p99(), None);
        assert_eq!(few.early_max(), Some(Duration::from_secs(9)));
        assert!(stats(&[9000, 20, 20, 20, 20]).p99().is_some());
    }

    #[test]
    fn waiting_is_not_busy_time() {
        let mut stats = StepTimeStats::default();
        for _ in 0..20 {
            stats.record(Duration::from_millis(100), Duration::from_millis(40));
        }
        let fraction = stats.busy_fraction().unwrap_or_default();
        assert!((fraction - 0.6).abs() < 1e-9, "{fraction}");
    }

    proptest! {
        #[test]
        fn at_most_one_step_in_a_hundred_is_longer_than_the_p99(millis in prop::collection::vec(1u64..60_000, 5..800)) {
            let p99 = stats(&millis).p99().unwrap_or_default();
            let recent: Vec<u64> = millis.iter().rev().take(WINDOW).copied().collect();
            let longer = recent.iter().filter(|step| Duration::from_millis(**step) > p99).count();
            prop_assert!(longer * 100 <= recent.len());
            prop_assert!(recent.iter().any(|step| Duration::from_millis(*step) == p99));
        }
    }
}

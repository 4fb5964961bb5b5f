//! How fast a loop goes: how long nearly all of its steps take, and how much of them is its own work.

use std::collections::VecDeque;
use std::time::Duration;

/// Steps that are remembered.
const REMEMBERED: usize = 512;

/// The first steps of a process are not like the others.
const FEW: usize = 5;

/// Steps over which shares are taken.
const RECENT: usize = 16;

/// What was learned of a loop's steps.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    steps: VecDeque<Step>,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    took: Duration,
    waited: Duration,
}

impl Pace {
    /// Takes note of a step, and of the part of it that was spent waiting for others.
    pub fn saw(&mut self, took: Duration, waited: Duration) {
        if self.steps.len() == REMEMBERED {
            self.steps.pop_front();
        }
        let waited = waited.min(took);
        self.steps.push_back(Step { took, waited });
    }

    /// What 99 of a hundred steps stay below. Nothing, as long as there were only a few.
    pub fn p99(&self) -> Option<Duration> {
        if self.steps.len() < FEW {
            return None;
        }
        let mut steps: Vec<Duration> = self.steps.iter().map(|step| step.took).collect();
        let place = (steps.len() * 99).div_ceil(100) - 1;
        let (_, p99, _) = steps.select_nth_unstable(place);
        Some(*p99)
    }

    /// The longest step, as long as there were only a few.
    pub fn longest_of_few(&self) -> Option<Duration> {
        let few = self.steps.iter().take(FEW);
        let longest = few.map(|step| step.took).max();
        longest.filter(|_| self.steps.len() < FEW)
    }

    /// The part of the last steps in which this rank did not wait for others.
    pub fn work_share(&self) -> Option<f64> {
        if self.steps.len() < FEW {
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

    fn of(millis: &[u64]) -> Pace {
        let mut pace = Pace::default();
        for millis in millis {
            pace.saw(Duration::from_millis(*millis), Duration::ZERO);
        }
        pace
    }

    #[test]
    fn a_few_steps_teach_nothing() {
        let few = of(&[9000, 20, 20, 20]);
        assert_eq!(few.p99(), None);
        assert_eq!(few.longest_of_few(), Some(Duration::from_secs(9)));
        assert!(of(&[9000, 20, 20, 20, 20]).p99().is_some());
    }

    #[test]
    fn waiting_is_not_work() {
        let mut pace = Pace::default();
        for _ in 0..20 {
            pace.saw(Duration::from_millis(100), Duration::from_millis(40));
        }
        let share = pace.work_share().unwrap_or_default();
        assert!((share - 0.6).abs() < 1e-9, "{share}");
    }

    proptest! {
        #[test]
        fn at_most_one_step_of_a_hundred_is_longer(millis in prop::collection::vec(1u64..60_000, 5..800)) {
            let p99 = of(&millis).p99().unwrap_or_default();
            let recent: Vec<u64> = millis.iter().rev().take(REMEMBERED).copied().collect();
            let longer = recent.iter().filter(|step| Duration::from_millis(**step) > p99).count();
            prop_assert!(longer * 100 <= recent.len());
            prop_assert!(recent.iter().any(|step| Duration::from_millis(*step) == p99));
        }
    }
}

//! When fragments are joined.

/// The schedule of outer steps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rounds {
    /// Steps of a round, in which every fragment is joined once.
    pub sync_steps: u64,
    pub num_fragments: u64,
    /// Steps between the begin of a fragment's communication and its end.
    pub delay: u64,
    /// The step before the first round.
    pub first_step: u64,
    /// At this step all fragments are joined.
    pub last_step: u64,
}

/// What happens to a fragment after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Act {
    pub fragment: usize,
    /// Whether its outer gradients are sent.
    pub begins: bool,
    /// Whether outer gradients arrive and the outer optimizer takes a step.
    pub ends: bool,
}

impl Rounds {
    /// What is due after this step, counted from 1. Communication that is in flight ends before more of it begins.
    pub(super) fn after(&self, step: u64) -> Vec<Act> {
        if step <= self.first_step {
            return Vec::new();
        }
        let is_last = step == self.last_step;
        let fragments = 0..self.num_fragments;
        let acts = fragments.map(|fragment| Act {
            fragment: fragment as usize,
            begins: self.begins_after(fragment, step) || is_last,
            ends: self.ends_after(fragment, step) || is_last,
        });
        acts.filter(|act| act.begins || act.ends).collect()
    }

    /// Whether all fragments have been joined once more.
    pub(super) fn is_end_of_round(&self, step: u64) -> bool {
        let is_due =
            step > self.first_step && (step - self.first_step).is_multiple_of(self.sync_steps);
        is_due || step == self.last_step
    }

    fn begins_after(&self, fragment: u64, step: u64) -> bool {
        let offset = fragment * self.sync_steps / self.num_fragments;
        let position = step - self.first_step + offset;
        position.is_multiple_of(self.sync_steps)
    }

    fn ends_after(&self, fragment: u64, step: u64) -> bool {
        step > self.first_step + self.delay && self.begins_after(fragment, step - self.delay)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// In every round, every fragment begins once, and ends as many steps later as asked for.
        #[test]
        fn every_fragment_is_joined_once_per_round(
            sync_steps in 1u64..40, num_fragments in 1u64..8, delay in 0u64..40, first_step in 0u64..10,
        ) {
            let num_fragments = num_fragments.min(sync_steps);
            let delay = delay % sync_steps;
            let last_step = u64::MAX;
            let rounds = Rounds { sync_steps, num_fragments, delay, first_step, last_step };
            for fragment in 0..num_fragments as usize {
                let steps = |test: fn(&Act) -> bool| -> Vec<u64> {
                    let is_due = |step: &u64| rounds.after(*step).iter().any(|act| act.fragment == fragment && test(act));
                    (1..first_step + 4 * sync_steps + delay + 1).filter(is_due).collect()
                };
                let (begins, ends) = (steps(|act| act.begins), steps(|act| act.ends));
                prop_assert!(begins.len() >= 4);
                prop_assert!(begins.windows(2).all(|pair| pair[1] - pair[0] == sync_steps));
                prop_assert!(begins[0] > first_step);
                let expected: Vec<u64> = begins.iter().map(|step| step + delay).collect();
                prop_assert_eq!(&ends[..4], &expected[..4]);
            }
            // A round without delay joins no more than its share of the fragments at once.
            let most = (1..sync_steps + 1).map(|step| rounds.after(first_step + step).iter().filter(|act| act.begins).count()).max();
            prop_assert_eq!(most, Some(1));
        }
    }

    #[test]
    fn the_last_step_joins_all() {
        let rounds = Rounds {
            sync_steps: 10,
            num_fragments: 3,
            delay: 2,
            first_step: 0,
            last_step: 14,
        };
        let acts = rounds.after(14);
        assert_eq!(acts.len(), 3);
        assert!(acts.iter().all(|act| act.begins && act.ends));
    }
}

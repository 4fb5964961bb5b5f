//! What a rank of a pipeline holds for backward passes to come.

use crate::{ComputeType, Schedule};

/// What a stage holds for one micro-batch.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct StageHeld {
    /// From its forward to its backward pass.
    pub activations: f64,
    /// From the backward pass for the input to that for the weights.
    pub weight_gradients: f64,
}

impl Schedule {
    /// The most that a rank holds at once, if stage `s` holds `of_stage(s)` for a micro-batch. It follows from the order of
    /// the rank's actions alone, not from their times.
    pub fn peak_held(&self, rank: usize, of_stage: impl Fn(usize) -> StageHeld) -> f64 {
        let actions = self.ranks.get(rank).into_iter().flatten();
        let (mut held, mut peak) = (0.0, 0.0_f64);
        for task in actions.flat_map(|action| action.tasks()) {
            let stage = of_stage(task.stage);
            held += match task.compute_type {
                ComputeType::Forward => stage.activations,
                ComputeType::Backward => -stage.activations,
                ComputeType::BackwardInput => stage.weight_gradients - stage.activations,
                ComputeType::BackwardWeight => -stage.weight_gradients,
            };
            peak = peak.max(held);
        }
        peak
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Costs, ScheduleKind, simulate};

    proptest! {
        #[test]
        fn it_is_the_number_in_flight_if_all_stages_hold_one(
            kind in prop::sample::select(ScheduleKind::ALL.to_vec()),
            num_ranks in 1usize..6,
            num_microbatches in 1usize..20,
        ) {
            let chunks = kind.num_chunks().unwrap_or(3);
            let Ok(schedule) = kind.build(num_ranks, num_microbatches, chunks) else {
                return Ok(());
            };
            let timeline = simulate(&schedule, &Costs::uniform(1.0, 1.0, 1.0)).unwrap();
            let one = StageHeld { activations: 1.0, weight_gradients: 1.0 };
            for (rank, in_flight) in timeline.max_in_flight().into_iter().enumerate() {
                prop_assert_eq!(schedule.peak_held(rank, |_| one), in_flight as f64);
            }
        }
    }
}

//! Generators of the action lists of each schedule.

mod dualpipe_v;
mod eager_1f1b;
mod gpipe;
mod interleaved;
mod looped;
mod one_forward_one_backward;
mod zero_bubble_h1;
mod zero_bubble_v;

pub(crate) use dualpipe_v::dualpipe_v;
pub(crate) use eager_1f1b::eager_1f1b;
pub(crate) use gpipe::gpipe;
pub(crate) use interleaved::interleaved;
pub(crate) use looped::looped;
pub(crate) use one_forward_one_backward::one_forward_one_backward;
pub(crate) use zero_bubble_h1::zero_bubble_h1;
pub(crate) use zero_bubble_v::zero_bubble_v;

use crate::{Action, ComputeType, Schedule, Task};

/// A schedule with loop placement: stage `s` is on rank `s % num_ranks`.
fn loop_placement(
    num_ranks: usize,
    num_microbatches: usize,
    num_chunks: usize,
    list: impl Fn(usize) -> Vec<Action>,
) -> Schedule {
    Schedule {
        num_microbatches,
        stage_to_rank: (0..num_ranks * num_chunks).map(|s| s % num_ranks).collect(),
        ranks: (0..num_ranks).map(list).collect(),
    }
}

/// A schedule with V placement: two stages per rank, one on the way down the ranks and one on the way back up.
fn v_placement(
    num_ranks: usize,
    num_microbatches: usize,
    list: impl Fn(usize) -> Vec<Action>,
) -> Schedule {
    Schedule {
        num_microbatches,
        stage_to_rank: (0..num_ranks).chain((0..num_ranks).rev()).collect(),
        ranks: (0..num_ranks).map(list).collect(),
    }
}

/// A stage of a rank while its action list is generated: the next micro-batch for each kind of computation.
struct StageCursor {
    stage: usize,
    forward: usize,
    backward: usize,
    weight: usize,
}

impl StageCursor {
    fn new(stage: usize) -> StageCursor {
        StageCursor {
            stage,
            forward: 0,
            backward: 0,
            weight: 0,
        }
    }

    fn forward(&mut self) -> Task {
        self.forward += 1;
        Task::new(self.stage, ComputeType::Forward, self.forward - 1)
    }

    /// The full backward; no weight gradients may be deferred.
    fn backward(&mut self) -> Task {
        self.backward += 1;
        self.weight += 1;
        Task::new(self.stage, ComputeType::Backward, self.backward - 1)
    }

    fn backward_input(&mut self) -> Task {
        self.backward += 1;
        Task::new(self.stage, ComputeType::BackwardInput, self.backward - 1)
    }

    fn backward_weight(&mut self) -> Task {
        self.weight += 1;
        Task::new(self.stage, ComputeType::BackwardWeight, self.weight - 1)
    }

    /// Whether weight gradients are deferred.
    fn has_deferred_weights(&self) -> bool {
        self.weight < self.backward
    }
}

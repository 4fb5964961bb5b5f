//! How the lists of a schedule are made.

mod dualpipe_v;
mod gpipe;
mod interleaved;
mod looped;
mod one_forward_one_backward;
mod zero_bubble_h1;
mod zero_bubble_v;

pub(crate) use dualpipe_v::dualpipe_v;
pub(crate) use gpipe::gpipe;
pub(crate) use interleaved::interleaved;
pub(crate) use looped::looped;
pub(crate) use one_forward_one_backward::one_forward_one_backward;
pub(crate) use zero_bubble_h1::zero_bubble_h1;
pub(crate) use zero_bubble_v::zero_bubble_v;

use crate::{Action, Schedule, Task, Work};

/// A schedule of ranks that hold stages round and round.
fn round(
    num_ranks: usize,
    num_microbatches: usize,
    num_chunks: usize,
    list: impl Fn(usize) -> Vec<Action>,
) -> Schedule {
    Schedule {
        num_microbatches,
        holders: (0..num_ranks * num_chunks).map(|s| s % num_ranks).collect(),
        ranks: (0..num_ranks).map(list).collect(),
    }
}

/// A schedule of ranks that hold one stage on the way down and one on the way up.
fn folded(
    num_ranks: usize,
    num_microbatches: usize,
    list: impl Fn(usize) -> Vec<Action>,
) -> Schedule {
    Schedule {
        num_microbatches,
        holders: (0..num_ranks).chain((0..num_ranks).rev()).collect(),
        ranks: (0..num_ranks).map(list).collect(),
    }
}

/// One stage of a rank whose list is being made: which micro-batch is next for each kind of work.
struct Stage {
    stage: usize,
    forward: usize,
    backward: usize,
    weight: usize,
}

impl Stage {
    fn new(stage: usize) -> Stage {
        Stage {
            stage,
            forward: 0,
            backward: 0,
            weight: 0,
        }
    }

    fn forward(&mut self) -> Task {
        self.forward += 1;
        Task::new(self.stage, Work::Forward, self.forward - 1)
    }

    /// The whole backward; nothing may be owed to the weights.
    fn backward(&mut self) -> Task {
        self.backward += 1;
        self.weight += 1;
        Task::new(self.stage, Work::Backward, self.backward - 1)
    }

    fn backward_input(&mut self) -> Task {
        self.backward += 1;
        Task::new(self.stage, Work::BackwardInput, self.backward - 1)
    }

    fn backward_weight(&mut self) -> Task {
        self.weight += 1;
        Task::new(self.stage, Work::BackwardWeight, self.weight - 1)
    }

    /// Whether gradients of weights are still to be computed.
    fn owes_weights(&self) -> bool {
        self.weight < self.backward
    }
}

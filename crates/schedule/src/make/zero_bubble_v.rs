//! ZB-V: V placement with split backward.
//!
//! Rank 0 has both the first and the last stage, so backward starts where forward started. With equal costs every
//! rank is busy from its first forward to its last weight gradient.

use super::{StageCursor, v_placement};
use crate::{Action, Schedule, Task};

pub(crate) fn zero_bubble_v(num_ranks: usize, num_microbatches: usize) -> Schedule {
    // Fewer micro-batches would not fill the pipeline; the surplus is dropped afterwards.
    let padded = num_microbatches.max(2 * num_ranks - 1);
    v_placement(num_ranks, padded, |rank| list(rank, num_ranks, padded))
        .with_microbatches(num_microbatches)
}

fn list(rank: usize, num_ranks: usize, num_microbatches: usize) -> Vec<Action> {
    let (mut down, mut up) = (
        StageCursor::new(rank),
        StageCursor::new(2 * num_ranks - 1 - rank),
    );
    let mut tasks: Vec<Task> = Vec::new();
    // Warm-up: until the first micro-batch comes back up.
    tasks.extend((0..2 * (num_ranks - rank) - 1).map(|_| down.forward()));
    for _ in 0..rank {
        tasks.extend([up.forward(), down.forward()]);
    }
    for _ in rank..num_ranks {
        tasks.extend([up.forward(), up.backward_input(), up.backward_weight()]);
    }
    // Steady state: one forward and one backward in each stage.
    while up.forward < down.forward || down.forward < num_microbatches {
        if down.forward < num_microbatches {
            tasks.push(down.forward());
        }
        tasks.extend([down.backward_input(), down.backward_weight()]);
        tasks.extend([up.forward(), up.backward_input(), up.backward_weight()]);
    }
    // Cool-down: input gradients first, which other ranks wait for, then weight gradients.
    for _ in 0..rank {
        tasks.extend([down.backward_input(), up.backward_input()]);
    }
    for _ in rank..num_ranks {
        tasks.extend([down.backward_input(), down.backward_weight()]);
    }
    while up.has_deferred_weights() {
        tasks.push(up.backward_weight());
    }
    while down.has_deferred_weights() {
        tasks.push(down.backward_weight());
    }
    tasks.into_iter().map(Action::Single).collect()
}

//! Two stages per rank, down the ranks and up again, and both parts of backward apart.
//!
//! The last stage is the first rank's, so backward begins where forward began: with equal costs every
//! rank is busy from its first forward to its last gradient.

use super::{Stage, folded};
use crate::{Action, Schedule, Task};

pub(crate) fn zero_bubble_v(num_ranks: usize, num_microbatches: usize) -> Schedule {
    // Fewer would not fill the pipeline; what is too much goes afterwards.
    let padded = num_microbatches.max(2 * num_ranks - 1);
    folded(num_ranks, padded, |rank| list(rank, num_ranks, padded)).truncated(num_microbatches)
}

fn list(rank: usize, num_ranks: usize, num_microbatches: usize) -> Vec<Action> {
    let (mut down, mut up) = (Stage::new(rank), Stage::new(2 * num_ranks - 1 - rank));
    let mut tasks: Vec<Task> = Vec::new();
    // Until the first micro-batch comes back up.
    tasks.extend((0..2 * (num_ranks - rank) - 1).map(|_| down.forward()));
    for _ in 0..rank {
        tasks.extend([up.forward(), down.forward()]);
    }
    for _ in rank..num_ranks {
        tasks.extend([up.forward(), up.backward_input(), up.backward_weight()]);
    }
    // One forward and one backward in each stage.
    while up.forward < down.forward || down.forward < num_microbatches {
        if down.forward < num_microbatches {
            tasks.push(down.forward());
        }
        tasks.extend([down.backward_input(), down.backward_weight()]);
        tasks.extend([up.forward(), up.backward_input(), up.backward_weight()]);
    }
    // What others wait for first, and gradients of weights where this rank would wait.
    for _ in 0..rank {
        tasks.extend([down.backward_input(), up.backward_input()]);
    }
    for _ in rank..num_ranks {
        tasks.extend([down.backward_input(), down.backward_weight()]);
    }
    while up.owes_weights() {
        tasks.push(up.backward_weight());
    }
    while down.owes_weights() {
        tasks.push(down.backward_weight());
    }
    tasks.into_iter().map(Action::One).collect()
}

//! One forward, one backward, whose weights' gradients fill what would be waiting.
//!
//! The later a rank, the fewer micro-batches it has in flight; so it may put off as many gradients of
//! weights as there are ranks before it, and no rank holds more than the first.

use super::one_forward_one_backward::alternating;
use super::{Stage, round};
use crate::Schedule;

pub(crate) fn zero_bubble_h1(num_ranks: usize, num_microbatches: usize) -> Schedule {
    round(num_ranks, num_microbatches, 1, |rank| {
        let mut stage = Stage::new(rank);
        let num_ahead = num_ranks - 1 - rank;
        let mut list = alternating(&mut stage, num_ahead, num_microbatches, |stage, list| {
            list.push(stage.backward_input().into());
            if stage.backward - stage.weight > rank {
                list.push(stage.backward_weight().into());
            }
        });
        while stage.owes_weights() {
            list.push(stage.backward_weight().into());
        }
        list
    })
}

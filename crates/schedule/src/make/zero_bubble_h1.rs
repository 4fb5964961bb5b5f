//! ZB-H1: 1F1B with weight gradients deferred into the bubble.
//!
//! A later rank has fewer micro-batches in flight, so it may defer as many weight gradients as there are ranks
//! before it without holding more than rank 0.

use super::one_forward_one_backward::alternating;
use super::{StageCursor, loop_placement};
use crate::Schedule;

pub(crate) fn zero_bubble_h1(num_ranks: usize, num_microbatches: usize) -> Schedule {
    loop_placement(num_ranks, num_microbatches, 1, |rank| {
        let mut stage = StageCursor::new(rank);
        let num_ahead = num_ranks - 1 - rank;
        let mut list = alternating(&mut stage, num_ahead, num_microbatches, |stage, list| {
            list.push(stage.backward_input().into());
            if stage.backward - stage.weight > rank {
                list.push(stage.backward_weight().into());
            }
        });
        while stage.has_deferred_weights() {
            list.push(stage.backward_weight().into());
        }
        list
    })
}

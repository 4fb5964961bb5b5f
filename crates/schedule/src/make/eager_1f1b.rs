//! Eager 1F1B: 1F1B with twice the warm-up, so that a rank has a forward to compute while a gradient is on its way.

use super::one_forward_one_backward::alternating;
use super::{StageCursor, loop_placement};
use crate::Schedule;

pub(crate) fn eager_1f1b(num_ranks: usize, num_microbatches: usize) -> Schedule {
    loop_placement(num_ranks, num_microbatches, 1, |rank| {
        let mut stage = StageCursor::new(rank);
        let num_ahead = 2 * (num_ranks - 1 - rank);
        alternating(&mut stage, num_ahead, num_microbatches, |stage, list| {
            list.push(stage.backward().into());
        })
    })
}

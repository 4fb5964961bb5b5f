//! 1F1B: a warm-up of as many forwards as there are later ranks, then one forward and one backward in turn.

use super::{StageCursor, loop_placement};
use crate::{Action, Schedule};

pub(crate) fn one_forward_one_backward(num_ranks: usize, num_microbatches: usize) -> Schedule {
    loop_placement(num_ranks, num_microbatches, 1, |rank| {
        let mut stage = StageCursor::new(rank);
        let num_ahead = num_ranks - 1 - rank;
        alternating(&mut stage, num_ahead, num_microbatches, |stage, list| {
            list.push(stage.backward().into());
        })
    })
}

/// `num_ahead` warm-up forwards, then a forward and a `backward` in turn until every micro-batch is done.
pub(super) fn alternating(
    stage: &mut StageCursor,
    num_ahead: usize,
    num_microbatches: usize,
    backward: impl Fn(&mut StageCursor, &mut Vec<Action>),
) -> Vec<Action> {
    let num_ahead = num_ahead.min(num_microbatches);
    let ahead = (0..num_ahead).map(|_| Action::from(stage.forward()));
    let mut list: Vec<Action> = ahead.collect();
    while stage.backward < num_microbatches {
        if stage.forward < num_microbatches {
            list.push(stage.forward().into());
        }
        backward(stage, &mut list);
    }
    list
}

//! One forward, one backward, after as many forwards as there are ranks behind.

use super::{Stage, round};
use crate::{Action, Schedule};

pub(crate) fn one_forward_one_backward(num_ranks: usize, num_microbatches: usize) -> Schedule {
    round(num_ranks, num_microbatches, 1, |rank| {
        let mut stage = Stage::new(rank);
        let num_ahead = num_ranks - 1 - rank;
        alternating(&mut stage, num_ahead, num_microbatches, |stage, list| {
            list.push(stage.backward().into());
        })
    })
}

/// So many forwards ahead, then a forward and a `backward` in turn until every micro-batch is through.
pub(super) fn alternating(
    stage: &mut Stage,
    num_ahead: usize,
    num_microbatches: usize,
    backward: impl Fn(&mut Stage, &mut Vec<Action>),
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

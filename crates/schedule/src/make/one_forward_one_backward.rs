//! One forward, one backward, after as many forwards as there are ranks behind.

use super::{Stage, round};
use crate::{Action, Schedule};

pub(crate) fn one_forward_one_backward(num_ranks: usize, num_microbatches: usize) -> Schedule {
    round(num_ranks, num_microbatches, 1, |rank| {
        let mut stage = Stage::new(rank);
        let mut list: Vec<Action> = Vec::new();
        let num_ahead = (num_ranks - 1 - rank).min(num_microbatches);
        list.extend((0..num_ahead).map(|_| Action::from(stage.forward())));
        while stage.backward < num_microbatches {
            if stage.forward < num_microbatches {
                list.push(stage.forward().into());
            }
            list.push(stage.backward().into());
        }
        list
    })
}

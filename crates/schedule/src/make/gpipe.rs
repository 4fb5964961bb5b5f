//! GPipe: all forwards, then all backwards.

use super::{StageCursor, loop_placement};
use crate::{Action, Schedule};

pub(crate) fn gpipe(num_ranks: usize, num_microbatches: usize) -> Schedule {
    loop_placement(num_ranks, num_microbatches, 1, |rank| {
        let mut stage = StageCursor::new(rank);
        let mut list: Vec<Action> = Vec::new();
        list.extend((0..num_microbatches).map(|_| Action::from(stage.forward())));
        list.extend((0..num_microbatches).map(|_| Action::from(stage.backward())));
        list
    })
}

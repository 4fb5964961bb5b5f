//! Looped breadth-first: several stages per rank, all micro-batches through one before the next.

use super::{StageCursor, loop_placement};
use crate::{Action, Schedule};

pub(crate) fn looped(num_ranks: usize, num_microbatches: usize, num_chunks: usize) -> Schedule {
    loop_placement(num_ranks, num_microbatches, num_chunks, |rank| {
        let mut list: Vec<Action> = Vec::new();
        let stages = || (0..num_chunks).map(|chunk| StageCursor::new(chunk * num_ranks + rank));
        for mut stage in stages() {
            list.extend((0..num_microbatches).map(|_| Action::from(stage.forward())));
        }
        for mut stage in stages().rev() {
            list.extend((0..num_microbatches).map(|_| Action::from(stage.backward())));
        }
        list
    })
}

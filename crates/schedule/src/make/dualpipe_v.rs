//! DualPipe-V: V placement with overlapped forward and backward.
//!
//! In the steady state every action is a pair, so that the communication of one task overlaps the computation of
//! the other. During cool-down the parts of backward are split, as in the zero-bubble schedules.

use super::{StageCursor, v_placement};
use crate::{Action, Schedule};

pub(crate) fn dualpipe_v(num_ranks: usize, num_microbatches: usize) -> Schedule {
    // Fewer micro-batches would not fill the pipeline; the surplus is dropped afterwards.
    let padded = num_microbatches.max(2 * num_ranks);
    let schedule = v_placement(num_ranks, padded, |rank| {
        let mut actions = RankActions {
            down: StageCursor::new(rank),
            up: StageCursor::new(2 * num_ranks - 1 - rank),
            deferred: Vec::new(),
            list: Vec::new(),
        };
        actions.fill(rank, num_ranks, padded);
        actions.list
    });
    schedule.with_microbatches(num_microbatches)
}

/// The action list of a rank under construction.
struct RankActions {
    down: StageCursor,
    up: StageCursor,
    /// Deferred weight gradients, in order; true for those of the upward stage.
    deferred: Vec<bool>,
    list: Vec<Action>,
}

impl RankActions {
    fn fill(&mut self, rank: usize, num_ranks: usize, num_microbatches: usize) {
        let behind = num_ranks - 1 - rank;
        for _ in 0..2 * behind {
            self.list.push(self.down.forward().into());
        }
        for _ in 0..=rank {
            self.list.push(self.down.forward().into());
            self.list.push(self.up.forward().into());
        }
        for _ in 0..behind {
            self.backward_input(true);
            self.flush_deferred();
            self.list.push(self.up.forward().into());
        }
        for number in 0..num_microbatches + rank + 1 - 2 * num_ranks {
            if number == 0 && behind == 0 {
                // The backward depends on the forward just before it, so they cannot overlap.

                self.list.push(self.down.forward().into());
                self.list.push(self.up.backward().into());
            } else {
                self.list
                    .push(Action::Overlapped(self.down.forward(), self.up.backward()))
            }
            self.list
                .push(Action::Overlapped(self.up.forward(), self.down.backward()));
        }
        for _ in 0..behind {
            self.list.push(self.up.backward().into());
            self.list
                .push(Action::Overlapped(self.up.forward(), self.down.backward()));
        }
        self.split_backward(rank + 1);
        for _ in 0..behind {
            self.flush_deferred();
            self.backward_input(false);
        }
        while !self.deferred.is_empty() {
            self.flush_deferred();
        }
    }

    /// Backwards of both stages; weight gradients are deferred from the middle on.
    fn split_backward(&mut self, number: usize) {
        for step in 0..2 * number {
            let is_up = step % 2 == 0;
            if step >= number {
                self.backward_input(is_up);
            } else if is_up {
                self.list.push(self.up.backward().into());
            } else {
                self.list.push(self.down.backward().into());
            }
        }
    }

    fn backward_input(&mut self, is_up: bool) {
        let stage = if is_up { &mut self.up } else { &mut self.down };
        self.list.push(stage.backward_input().into());
        self.deferred.push(is_up);
    }

    /// Computes the oldest deferred weight gradients.
    fn flush_deferred(&mut self) {
        if self.deferred.is_empty() {
            return;
        }
        let stage = if self.deferred.remove(0) {
            &mut self.up
        } else {
            &mut self.down
        };
        self.list.push(stage.backward_weight().into());
    }
}

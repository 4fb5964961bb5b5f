//! Down the ranks and up again, with a forward and a backward beside each other.
//!
//! In the middle of the step every action is a pair: the communication of one hides behind the
//! computation of the other. Towards the end the parts of backward come apart, as in the zero-bubble
//! schedules.

use super::{Stage, folded};
use crate::{Action, Schedule};

pub(crate) fn dualpipe_v(num_ranks: usize, num_microbatches: usize) -> Schedule {
    // Fewer would not fill the pipeline; what is too much goes afterwards.
    let padded = num_microbatches.max(2 * num_ranks);
    let schedule = folded(num_ranks, padded, |rank| {
        let mut lists = Lists {
            down: Stage::new(rank),
            up: Stage::new(2 * num_ranks - 1 - rank),
            owed: Vec::new(),
            list: Vec::new(),
        };
        lists.fill(rank, num_ranks, padded);
        lists.list
    });
    schedule.truncated(num_microbatches)
}

/// A rank's list being made.
struct Lists {
    down: Stage,
    up: Stage,
    /// Gradients of weights that were put off, in order: whether each is of the way up.
    owed: Vec<bool>,
    list: Vec<Action>,
}

impl Lists {
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
            self.pay();
            self.list.push(self.up.forward().into());
        }
        for number in 0..num_microbatches + rank + 1 - 2 * num_ranks {
            match number == 0 && behind == 0 {
                // Its backward waits for a forward just before: beside each other they cannot be.
                true => {
                    self.list.push(self.down.forward().into());
                    self.list.push(self.up.backward().into());
                }
                false => self
                    .list
                    .push(Action::Both(self.down.forward(), self.up.backward())),
            }
            self.list
                .push(Action::Both(self.up.forward(), self.down.backward()));
        }
        for _ in 0..behind {
            self.list.push(self.up.backward().into());
            self.list
                .push(Action::Both(self.up.forward(), self.down.backward()));
        }
        self.take_apart(rank + 1);
        for _ in 0..behind {
            self.pay();
            self.backward_input(false);
        }
        while !self.owed.is_empty() {
            self.pay();
        }
    }

    /// Backward in both stages; from the middle on, gradients of weights are put off.
    fn take_apart(&mut self, number: usize) {
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
        self.owed.push(is_up);
    }

    /// Computes the gradient of weights that was put off longest.
    fn pay(&mut self) {
        if self.owed.is_empty() {
            return;
        }
        let stage = match self.owed.remove(0) {
            true => &mut self.up,
            false => &mut self.down,
        };
        self.list.push(stage.backward_weight().into());
    }
}

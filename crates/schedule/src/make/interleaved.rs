//! Interleaved 1F1B: several stages per rank.
//!
//! Micro-batches are processed in groups of as many as there are ranks: a group passes through a rank's first
//! stage, then its second, and so on, before the next group starts.

use super::{loop_placement, one_forward_one_backward};
use crate::{Action, ComputeType, Schedule, Task};

pub(crate) fn interleaved(
    num_ranks: usize,
    num_microbatches: usize,
    num_chunks: usize,
) -> Schedule {
    if num_chunks == 1 {
        return one_forward_one_backward(num_ranks, num_microbatches);
    }
    // The last group is filled up; the surplus is dropped afterwards.
    let padded = num_microbatches.next_multiple_of(num_ranks);
    let order = InterleavedOrder {
        num_ranks,
        num_chunks,
    };
    let schedule = loop_placement(num_ranks, padded, num_chunks, |rank| {
        let total = padded * num_chunks;
        let ahead = 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks;
        let ahead = ahead.min(total);
        let mut list: Vec<Action> = Vec::new();
        list.extend((0..ahead).map(|number| order.forward(rank, number)));
        for number in 0..total {
            if ahead + number < total {
                list.push(order.forward(rank, ahead + number));
            }
            list.push(order.backward(rank, number));
        }
        list
    });
    schedule.with_microbatches(num_microbatches)
}

struct InterleavedOrder {
    num_ranks: usize,
    num_chunks: usize,
}

impl InterleavedOrder {
    /// The chunk and the micro-batch at this position of the order.
    fn at(&self, number: usize) -> (usize, usize) {
        let (group, within) = (
            number / (self.num_ranks * self.num_chunks),
            number % (self.num_ranks * self.num_chunks),
        );
        let microbatch = group * self.num_ranks + within % self.num_ranks;
        (within / self.num_ranks, microbatch)
    }

    fn forward(&self, rank: usize, number: usize) -> Action {
        let (chunk, microbatch) = self.at(number);
        Task::new(
            chunk * self.num_ranks + rank,
            ComputeType::Forward,
            microbatch,
        )
        .into()
    }

    fn backward(&self, rank: usize, number: usize) -> Action {
        let (chunk, microbatch) = self.at(number);
        let chunk = self.num_chunks - 1 - chunk;
        Task::new(
            chunk * self.num_ranks + rank,
            ComputeType::Backward,
            microbatch,
        )
        .into()
    }
}

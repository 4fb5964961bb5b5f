//! Closed forms for pipeline schedules: the bubble and the micro-batches in flight.
//!
//! The planner's search evaluates these millions of times. [`simulate`](crate::simulate) runs every action and gives the
//! same numbers for the finalists.

use crate::ScheduleKind;

/// The time of one micro-batch on one rank, over all its stages.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct StageTime {
    /// Forward pass.
    pub forward: f64,
    /// Backward pass for the input gradient.
    pub backward_input: f64,
    /// Backward pass for the weight gradient.
    pub backward_weight: f64,
}

impl StageTime {
    /// Forward and backward together.
    pub const fn total(&self) -> f64 {
        self.forward + self.backward_input + self.backward_weight
    }
}

/// The peak number of micro-batches in flight on a rank, counted per stage.
pub fn in_flight(
    kind: ScheduleKind,
    num_ranks: usize,
    num_microbatches: usize,
    num_chunks: usize,
    rank: usize,
) -> usize {
    let (pp, m, v) = (num_ranks, num_microbatches, num_chunks);
    let downstream = pp - 1 - rank;
    match kind {
        ScheduleKind::GPipe => m,
        ScheduleKind::OneForwardOneBackward => m.min(downstream + 1),
        ScheduleKind::EagerOneForwardOneBackward => m.min(2 * downstream + 1),
        ScheduleKind::Interleaved if v == 1 => m.min(downstream + 1),
        ScheduleKind::Interleaved => (m * v).min(2 * downstream + (v - 1) * pp + 1),
        ScheduleKind::LoopedBreadthFirst => m * v,
        ScheduleKind::ZeroBubbleH1 => m.min(pp),
        ScheduleKind::ZeroBubbleV => (2 * m).min(2 * pp),
        ScheduleKind::DualPipeV => (2 * m).min(2 * pp + 1),
    }
}

/// The pipeline bubble: how much longer a step takes than the compute of its slowest rank. `other` is the time of a
/// micro-batch on every other rank; communication is free.
///
/// Exact for GPipe and both forms of 1F1B, for interleaved 1F1B if the ranks divide the micro-batches, and for ZB-H1 with at
/// least twice as many micro-batches as ranks. Elsewhere a close upper estimate.
pub fn bubble(
    kind: ScheduleKind,
    num_ranks: usize,
    num_microbatches: usize,
    num_chunks: usize,
    other: StageTime,
) -> f64 {
    let (pp, m, v) = (num_ranks, num_microbatches, num_chunks as f64);
    let others = (pp - 1) as f64;
    let total = other.total();
    match kind {
        ScheduleKind::GPipe
        | ScheduleKind::OneForwardOneBackward
        | ScheduleKind::EagerOneForwardOneBackward => others * total,
        ScheduleKind::LoopedBreadthFirst if m >= pp => others * total / v,
        ScheduleKind::Interleaved | ScheduleKind::LoopedBreadthFirst => {
            // An incomplete last group takes as long as a full one.
            let missing = match m % pp {
                0 => 0.0,
                rest => (pp - rest) as f64 * (v - 1.0),
            };
            (others + missing) * total / v
        }
        ScheduleKind::ZeroBubbleH1 if m < 2 * pp => others * total,
        ScheduleKind::ZeroBubbleH1 => {
            let (forward, input) = (other.forward, other.backward_input);
            let unfilled = forward + input - other.backward_weight;
            others * unfilled.max(forward).max(input)
        }
        ScheduleKind::ZeroBubbleV | ScheduleKind::DualPipeV if m < 2 * pp => others * total,
        ScheduleKind::ZeroBubbleV => {
            let parts = [other.forward, other.backward_input, other.backward_weight];
            others / 2.0 * parts.into_iter().fold(0.0, f64::max)
        }
        ScheduleKind::DualPipeV => others * other.forward.max(other.backward_input),
    }
}

/// The step time of ZB-H1 if the first, the inner and the last ranks differ. Requires at least twice as many
/// micro-batches as ranks.
///
/// A rank cannot finish before its own work, which starts with its first forward, or with the first gradient that
/// comes back if that is later. Nor can it finish before a rank whose last gradient it waits for: rank `r` defers
/// the weight gradients of `r` micro-batches to the end, so its last input gradient leaves that much earlier.
pub fn zero_bubble_h1(
    [first, inner, last]: [StageTime; 3],
    num_ranks: usize,
    num_microbatches: usize,
) -> f64 {
    let (pp, m) = (num_ranks, num_microbatches as f64);
    let at = |rank: usize| match rank {
        0 => first,
        rank if rank + 1 == pp => last,
        _ => inner,
    };
    // Sums over the ranks `from..to`.
    let sum = |from: usize, to: usize, of: fn(&StageTime) -> f64| {
        let num_inner = to.min(pp - 1).saturating_sub(from.max(1)) as f64;
        let mut sum = num_inner * of(&inner);
        if from == 0 && to > 0 {
            sum += of(&first);
        }
        if to == pp && from < pp && pp > 1 {
            sum += of(&last);
        }
        sum
    };
    let forward = |time: &StageTime| time.forward;
    let backward = |time: &StageTime| time.backward_input;
    // The inner ranks are equal, so the critical path turns at one of these.
    let corners = [0, 1, pp.saturating_sub(2), pp - 1].map(|rank| rank.min(pp - 1));
    let mut longest: f64 = 0.0;
    for rank in corners {
        let own = at(rank);
        let round_trip = sum(rank + 1, pp, forward) + sum(rank + 1, pp, backward);
        let lead = (pp - 1 - rank) as f64 * own.forward;
        let start = sum(0, rank, forward) + (round_trip - lead).max(0.0);
        let deferred = (rank + 1) as f64 * own.backward_weight;
        let last_gradient = start + m * own.total() - deferred;
        for end in corners.into_iter().filter(|end| *end <= rank) {
            let rest = (end + 1) as f64 * at(end).backward_weight;
            longest = longest.max(last_gradient + sum(end, rank, backward) + rest);
        }
    }
    longest
}

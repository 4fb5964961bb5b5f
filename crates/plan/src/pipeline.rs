//! A pipeline in closed form: how long a step takes and what waits in memory.
//!
//! A search asks this a million times; [`trainyard_schedule::simulate`], which follows every action,
//! gives the same numbers for finalists.

use trainyard_schedule::Kind;

/// What one micro-batch costs on one rank, all its stages together.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct StageTime {
    /// Forward.
    pub forward: f64,
    /// Backward for what came in.
    pub backward_input: f64,
    /// Backward for weights.
    pub backward_weight: f64,
}

impl StageTime {
    /// Forward and backward.
    pub const fn whole(&self) -> f64 {
        self.forward + self.backward_input + self.backward_weight
    }
}

/// How many micro-batches a rank keeps something of at once, counted per stage.
pub fn in_flight(
    kind: Kind,
    num_ranks: usize,
    num_microbatches: usize,
    num_chunks: usize,
    rank: usize,
) -> usize {
    let (pp, m, v) = (num_ranks, num_microbatches, num_chunks);
    let after = pp - 1 - rank;
    match kind {
        Kind::GPipe => m,
        Kind::OneForwardOneBackward => m.min(after + 1),
        Kind::Interleaved if v == 1 => m.min(after + 1),
        Kind::Interleaved => (m * v).min(2 * after + (v - 1) * pp + 1),
        Kind::LoopedBreadthFirst => m * v,
        Kind::ZeroBubbleH1 => m.min(pp),
        Kind::ZeroBubbleV => (2 * m).min(2 * pp),
        Kind::DualPipeV => (2 * m).min(2 * pp + 1),
    }
}

/// How much longer a step takes than its slowest rank's work, where `other` is what a micro-batch costs
/// on every other rank and messages cost nothing.
///
/// Exact for GPipe, 1F1B and, where ranks divide micro-batches, interleaved; for ZB-H1 from twice as many
/// micro-batches as ranks on. Elsewhere near, and rather too long.
pub fn bubble(
    kind: Kind,
    num_ranks: usize,
    num_microbatches: usize,
    num_chunks: usize,
    other: StageTime,
) -> f64 {
    let (pp, m, v) = (num_ranks, num_microbatches, num_chunks as f64);
    let others = (pp - 1) as f64;
    let whole = other.whole();
    match kind {
        Kind::GPipe | Kind::OneForwardOneBackward => others * whole,
        Kind::LoopedBreadthFirst if m >= pp => others * whole / v,
        Kind::Interleaved | Kind::LoopedBreadthFirst => {
            // A last group that is not full goes at the pace of a full one.
            let missing = match m % pp {
                0 => 0.0,
                rest => (pp - rest) as f64 * (v - 1.0),
            };
            (others + missing) * whole / v
        }
        Kind::ZeroBubbleH1 if m < 2 * pp => others * whole,
        Kind::ZeroBubbleH1 => {
            let (forward, input) = (other.forward, other.backward_input);
            let unfilled = forward + input - other.backward_weight;
            others * unfilled.max(forward).max(input)
        }
        Kind::ZeroBubbleV | Kind::DualPipeV if m < 2 * pp => others * whole,
        Kind::ZeroBubbleV => {
            let parts = [other.forward, other.backward_input, other.backward_weight];
            others / 2.0 * parts.into_iter().fold(0.0, f64::max)
        }
        Kind::DualPipeV => others * other.forward.max(other.backward_input),
    }
}

/// How long a step of ZB-H1 takes on ranks that differ: the first, those between and the last. It needs twice
/// as many micro-batches as ranks.
///
/// A rank is never done before its own work, begun when its first forward could, or when the first gradient
/// came back if that was later. Nor is it done before another whose last gradient it waited for: rank `r` keeps
/// the gradients of `r` micro-batches' weights for the end, so its last gradient leaves it so much earlier.
pub fn zero_bubble_h1(
    [first, between, last]: [StageTime; 3],
    num_ranks: usize,
    num_microbatches: usize,
) -> f64 {
    let (pp, m) = (num_ranks, num_microbatches as f64);
    let at = |rank: usize| match rank {
        0 => first,
        rank if rank + 1 == pp => last,
        _ => between,
    };
    // Over ranks from one to before another.
    let sum = |from: usize, to: usize, of: fn(&StageTime) -> f64| {
        let num_between = to.min(pp - 1).saturating_sub(from.max(1)) as f64;
        let mut sum = num_between * of(&between);
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
    // Those between are alike, so the longest way turns at one of these.
    let corners = [0, 1, pp.saturating_sub(2), pp - 1].map(|rank| rank.min(pp - 1));
    let mut longest: f64 = 0.0;
    for rank in corners {
        let own = at(rank);
        let there_and_back = sum(rank + 1, pp, forward) + sum(rank + 1, pp, backward);
        let ahead = (pp - 1 - rank) as f64 * own.forward;
        let begun = sum(0, rank, forward) + (there_and_back - ahead).max(0.0);
        let kept = (rank + 1) as f64 * own.backward_weight;
        let last_gradient = begun + m * own.whole() - kept;
        for end in corners.into_iter().filter(|end| *end <= rank) {
            let rest = (end + 1) as f64 * at(end).backward_weight;
            longest = longest.max(last_gradient + sum(end, rank, backward) + rest);
        }
    }
    longest
}

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

//! What strategies cost, by closed formulas: bytes that ranks send in a step, and bytes that a rank holds between steps.
//!
//! The formulas follow from the definition of the strategies, not from their code. `verify`, dry runs and tests compare them with
//! what the ledger and the allocator counted, and the planner searches with them.

mod encoding;
mod outer;
mod partition;
mod state_bytes;
mod volume;
mod zero;

pub use encoding::Encoding;
pub use outer::{OUTER_WIDTH, OuterStates};
pub use partition::{TooManyStages, partition_balanced};
pub use state_bytes::{ShardedElements, StateBytes, StateWidths};
pub use volume::{CommCounts, PartialGradBytes, Volume, broadcast_volume, replicated_volume};
pub use zero::{Reshard, ShardedModel, Stage, Widths};

/// A strategy that knows its costs.
pub trait CostModel {
    /// Bytes that all `world_size` ranks send in a step with these counts.
    fn volume(&self, counts: CommCounts, world_size: usize) -> Volume;

    /// Bytes that this rank holds between steps, without the optimizer's state tensors.
    fn states(&self) -> StateBytes;
}

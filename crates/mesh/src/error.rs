//! Errors of meshes, layouts and their text forms.

use crate::{Axis, AxisSet, Dim};

/// An invalid mesh, rank, layout or name.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MeshError {
    /// An axis has size zero.
    #[error("axis {axis} has size 0; use 1 for an axis that splits nothing")]
    EmptyAxis {
        /// The axis.
        axis: Axis,
    },
    /// An axis is listed twice.
    #[error("axis {axis} is listed twice; list each axis once")]
    DuplicateAxis {
        /// The axis.
        axis: Axis,
    },
    /// The product of the sizes overflows `usize`.
    #[error("a mesh of {sizes:?} has too many ranks; check the axis sizes")]
    TooManyRanks {
        /// The sizes, outermost first.
        sizes: Vec<usize>,
    },
    /// The expert parallel degree must divide the number of ranks it is laid over.
    #[error(
        "ep {ep} does not divide dp_shard*cp*tp = {over}; choose one of its divisors, at least 1"
    )]
    EpNotDivisor {
        /// The requested expert parallel degree.
        ep: usize,
        /// The size of `dp_shard * cp * tp`.
        over: usize,
    },
    /// The size of an expert axis was given, although it is derived.
    #[error("axis {axis} is derived from dp_shard, cp, tp and ep; set the sizes of those instead")]
    DerivedAxis {
        /// The axis.
        axis: Axis,
    },
    /// A set mixes the dense axes with the expert axes that cover the same ranks.
    #[error(
        "{axes} mixes dense and expert axes, which cover the same ranks; use dp_shard, cp and tp, or efsdp and ep"
    )]
    MixedAxes {
        /// The axes.
        axes: AxisSet,
    },
    /// A rank is not in the mesh.
    #[error("rank {rank} is out of range for a mesh of {world_size} ranks; ranks start at 0")]
    RankOutOfRange {
        /// The rank.
        rank: usize,
        /// The number of ranks of the mesh.
        world_size: usize,
    },
    /// A coordinate is not on its axis.
    #[error(
        "coordinate {coordinate} is out of range for axis {axis} of size {size}; coordinates start at 0"
    )]
    CoordinateOutOfRange {
        /// The axis.
        axis: Axis,
        /// The coordinate.
        coordinate: usize,
        /// The size of the axis.
        size: usize,
    },
    /// A layout shards a dimension that the tensor does not have.
    #[error("axis {axis} shards dim {dim}, but shape {shape:?} has {} dims", shape.len())]
    DimOutOfRange {
        /// The axis that shards.
        axis: Axis,
        /// The dimension it names.
        dim: Dim,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// A layout shards a dimension after an inner axis flattened the tensor.
    #[error(
        "axis {outer} shards dim {dim}, but inner axis {inner} already shards the tensor flat; \
         shard on axes inside {inner}, or place {outer} flat too"
    )]
    ShardAfterFlat {
        /// The axis that shards.
        outer: Axis,
        /// The dimension it names.
        dim: Dim,
        /// The inner axis that shards flat.
        inner: Axis,
    },
    /// A layout packs a tensor into two different flat parameters, or mixes packed and flat placements.
    #[error(
        "axis {axis} shards flat in another way than an inner axis; use the same packed placement for both, \
         or flat for both"
    )]
    MixedFlat {
        /// The outer one of the two axes.
        axis: Axis,
    },
    /// The number of elements of a tensor overflows `usize`.
    #[error("shape {shape:?} has too many elements; check its dims")]
    TooManyElements {
        /// The shape.
        shape: Vec<usize>,
    },
    /// A name is not that of an axis.
    #[error(
        "`{name}` is not a mesh axis; the axes are pp, dp_replicate, dp_shard, cp, tp, efsdp, ep"
    )]
    UnknownAxis {
        /// The name.
        name: String,
    },
    /// A text is not a placement.
    #[error(
        "`{text}` is not a placement; write replicate, shard(DIM), flat, \
         packed(START,TOTAL) or partial"
    )]
    UnknownPlacement {
        /// The text.
        text: String,
    },
}

//! What a mesh, a layout or a name can be refused for.

use crate::{Axis, AxisSet, Dim};

/// A mesh, a rank, a layout or a name that cannot be.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MeshError {
    /// An axis was given no ranks.
    #[error("axis {axis} has size 0; use 1 for an axis that splits nothing")]
    EmptyAxis {
        /// The axis.
        axis: Axis,
    },
    /// An axis was given twice.
    #[error("axis {axis} is given twice; give each axis one size")]
    DuplicateAxis {
        /// The axis.
        axis: Axis,
    },
    /// The product of the sizes is no machine number.
    #[error("a mesh of {sizes:?} has more ranks than can be counted; check the axis sizes")]
    TooManyRanks {
        /// The sizes, outermost first.
        sizes: Vec<usize>,
    },
    /// Expert parallelism must divide the ranks it is laid over.
    #[error(
        "ep {ep} does not divide dp_shard*cp*tp = {over}; choose one of its divisors, at least 1"
    )]
    ExpertsDoNotDivide {
        /// The size asked for.
        ep: usize,
        /// The size of `dp_shard * cp * tp`.
        over: usize,
    },
    /// The sizes of experts' axes follow from that of `ep`.
    #[error("axis {axis} is laid over dp_shard, cp and tp; give those sizes, and ep beside them")]
    LaidOver {
        /// The axis.
        axis: Axis,
    },
    /// Axes that count the same ranks in two ways.
    #[error(
        "{axes} counts ranks of dp_shard, cp and tp in two ways; use those axes, or efsdp and ep"
    )]
    CountedTwice {
        /// The axes.
        axes: AxisSet,
    },
    /// A rank beyond the mesh.
    #[error("rank {rank} is outside the mesh of {world_size} ranks; ranks start at 0")]
    RankOutside {
        /// The rank.
        rank: usize,
        /// How many ranks there are.
        world_size: usize,
    },
    /// A coordinate beyond its axis.
    #[error(
        "coordinate {coordinate} is outside axis {axis} of size {size}; coordinates start at 0"
    )]
    CoordinateOutside {
        /// The axis.
        axis: Axis,
        /// The coordinate.
        coordinate: usize,
        /// The size of the axis.
        size: usize,
    },
    /// A shard along a dimension that the tensor lacks.
    #[error("axis {axis} shards dim {dim}, but shape {shape:?} has {} dims", shape.len())]
    DimOutside {
        /// The axis that shards.
        axis: Axis,
        /// The dimension it names.
        dim: Dim,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// A flat interval has no dimensions left to shard.
    #[error(
        "axis {outer} shards dim {dim} of what axis {inner} has already cut flat; \
         shard on axes inside {inner}, or place {outer} flat too"
    )]
    ShardOutsideFlat {
        /// The axis that shards.
        outer: Axis,
        /// The dimension it names.
        dim: Dim,
        /// The axis inside it that cuts flat.
        inner: Axis,
    },
    /// Two rows, or a row and a flat cut, for one tensor.
    #[error(
        "axis {axis} cuts flat what an axis inside it has cut in another way; place both packed in \
         the same row, or both flat"
    )]
    MixedFlat {
        /// The outer one of the two axes.
        axis: Axis,
    },
    /// A tensor with more elements than can be counted.
    #[error("shape {shape:?} has more elements than can be counted; check its dims")]
    TooManyElements {
        /// The shape.
        shape: Vec<usize>,
    },
    /// A name that is none of the axes.
    #[error("`{name}` is no mesh axis; the axes are pp, dp_replicate, dp_shard, cp, tp, efsdp, ep")]
    UnknownAxis {
        /// The name.
        name: String,
    },
    /// A text that is no placement.
    #[error(
        "`{text}` is no placement; write replicate, shard(DIM), flat, \
         packed(START,TOTAL) or partial"
    )]
    UnknownPlacement {
        /// The text.
        text: String,
    },
}

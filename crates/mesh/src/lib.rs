//! Where every rank stands and what it holds.
//!
//! A job's ranks form a [`Mesh`] of five named axes. Fixing some coordinates and letting the
//! others run gives a group of ranks; saying for each axis how it treats a tensor gives a
//! [`Layout`]; mesh, layout and rank together give the [`Slice`] of a tensor that the rank holds.
//! All of it is arithmetic: no tables per rank, so 16,384 ranks cost what 2 cost.
//!
//! ```
//! use trainyard_mesh::{Axis, AxisSet, Mesh};
//!
//! let mesh = Mesh::new(&[(Axis::Pp, 2), (Axis::DpShard, 2), (Axis::Tp, 2)])?;
//! assert_eq!(mesh.to_string(), "pp2 x dp_shard2 x tp2");
//! assert_eq!(mesh.group(5, Axis::Tp)?, [4, 5]);
//! assert_eq!(mesh.group(5, AxisSet::of([Axis::Pp, Axis::DpShard]))?, [1, 3, 5, 7]);
//! # Ok::<(), trainyard_mesh::MeshError>(())
//! ```

mod axis;
mod chart;
mod error;
mod mesh;
mod overlap;
mod placement;
mod slice;

pub use axis::{Axis, AxisSet};
pub use chart::{Chart, Role};
pub use error::MeshError;
pub use mesh::{Coordinates, Mesh};
pub use overlap::{Overlap, overlaps};
pub use placement::{Dim, Layout, Packed, Placement};
pub use slice::{Region, Slice, chunk, slice_of};

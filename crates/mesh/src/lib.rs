//! Device meshes and tensor layouts: the coordinates of every rank, and the slice of a tensor that it holds.
//!
//! The ranks of a job form a [`Mesh`] of five named axes. Ranks that differ only along some axes form a process
//! group. A [`Layout`] gives a placement per axis, as PyTorch's DTensor does; mesh, layout and rank together
//! determine the [`Slice`] of a tensor that the rank holds. Everything is computed arithmetically, without
//! tables per rank, so 16,384 ranks cost as much as 2.
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
mod diagram;
mod error;
mod mesh;
mod overlap;
mod placement;
mod slice;

pub use axis::{Axis, AxisSet};
pub use diagram::{MeshDiagram, Role};
pub use error::MeshError;
pub use mesh::{Coordinates, Mesh};
pub use overlap::{Overlap, overlaps};
pub use placement::{Dim, Layout, Packed, Placement};
pub use slice::{Region, Slice, chunk, slice_of};

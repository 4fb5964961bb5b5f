//! A training state in files: saved by many ranks, loaded by as many others as you like.
//!
//! A checkpoint is a folder `step-{N}`:
//!
//! ```text
//! step-500/manifest.json               every tensor's name, type and shape, and where its parts lie
//! step-500/rank00003-....safetensors   the parts that one rank wrote
//! ```
//!
//! Every rank writes its own file; then one of them puts the manifest in its place, in one step.
//! Whatever has a manifest is complete, and whatever has none is a leftover that nobody reads. The
//! manifest has a digest of itself and of every block of every file, so nothing is read that was not
//! written.
//!
//! Which part of a tensor lies where is told by [`trainyard_mesh::Slice`], which knows nothing of the
//! ranks that were there. A reader asks for any slice and gets it from whichever parts have it, so a
//! state saved on one mesh loads on any other.
//!
//! Nothing here computes, so nothing here needs libtorch: the command line inspects and converts
//! checkpoints with this crate alone.

mod digest;
mod error;
mod experts;
mod folder;
mod foreign;
mod hugging_face;
mod load;
mod manifest;
mod neighbours;
mod save;
mod shard;
mod state;
pub mod store;
mod version_1;

pub use digest::{BLOCK, Digest};
pub use error::{CheckpointError, Result};
pub use folder::{latest, latest_whole, step_folder};
pub use hugging_face::export;
pub use load::{Checkpoint, Want};
pub use manifest::{FileEntry, MANIFEST, Manifest, Piece, TensorEntry};
pub use neighbours::neighbours;
pub use safetensors::Dtype;
pub use save::{commit, retain};
pub use shard::{Elements, Part, Shard, write_shard};
pub use state::TrainState;
pub use store::Store;

/// What the names of parameters begin with.
pub const MODEL: &str = "model/";
/// What the names of the optimiser's tensors begin with.
pub const OPTIMIZER: &str = "optimizer/";

/// A parameter's name in a checkpoint.
pub fn model_name(parameter: &str) -> String {
    format!("{MODEL}{parameter}")
}

/// The name in a checkpoint of a tensor the optimiser calls `kind.<parameter>`.
pub fn optimizer_name(state: &str) -> String {
    format!("{OPTIMIZER}{state}")
}

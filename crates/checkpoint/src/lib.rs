//! Sharded checkpoints: every rank writes a file, and a job of any other size and mesh loads them.
//!
//! A checkpoint is a directory `step-{N}`:
//!
//! ```text
//! step-500/manifest.json               name, type and shape of every tensor, and where its chunks are
//! step-500/rank00003-....safetensors   the chunks that one rank wrote
//! ```
//!
//! Every rank writes its own file. Then one rank writes the manifest atomically. A directory with a
//! manifest is a complete checkpoint; a directory without one is the remainder of an interrupted save,
//! and readers ignore it. The manifest holds a digest of itself and of every block of every file, so a
//! reader detects corruption before it uses any byte.
//!
//! A [`trainyard_mesh::Slice`] describes which elements of a tensor a chunk holds, independent of the
//! ranks that wrote it. A reader requests any slice and gets it from the chunks that overlap it, so a
//! state that was saved on one mesh loads on any other (resharding on load).
//!
//! This crate does not depend on libtorch: the command line inspects and converts checkpoints with it
//! alone.

mod cast;
mod digest;
mod error;
mod experts;
mod fused_projections;
mod group_by_bytes;
mod hugging_face;
mod load;
mod manifest;
mod owner;
mod room;
mod safetensors_dir;
mod save;
mod shard;
mod state;
mod step_dir;
pub mod store;
mod survey;

pub use digest::{BLOCK_BYTES, Digest};
pub use error::{CheckpointError, Result};
pub use group_by_bytes::group_by_bytes;
pub use hugging_face::{ExportOptions, export, has_export};
pub use load::{Checkpoint, ReadRequest};
pub use manifest::{Chunk, FORMAT_VERSION, FileEntry, MANIFEST, Manifest, TensorEntry};
pub use owner::{Lock, OWNER, Owner, Ownership};
pub use room::lacking_bytes;
pub use safetensors::Dtype;
pub use save::{check_files, commit, retain};
pub use shard::{ElementSource, Shard, WriteItem, write_shard};
pub use state::TrainState;
pub use step_dir::{latest, latest_below, latest_complete, latest_complete_below, step_dir};
pub use store::Store;
pub use survey::{Condition, survey};

/// The prefix of parameter names in a checkpoint.
pub const MODEL: &str = "model/";
/// The prefix of optimizer-state names in a checkpoint.
pub const OPTIMIZER: &str = "optimizer/";

/// The name of a parameter in a checkpoint.
pub fn model_name(parameter: &str) -> String {
    format!("{MODEL}{parameter}")
}

/// The name in a checkpoint of the optimizer-state tensor `kind.<parameter>`.
pub fn optimizer_name(state: &str) -> String {
    format!("{OPTIMIZER}{state}")
}

//! A training state on disk: saved whole, loaded again.
//!
//! A checkpoint is a folder `step-{N}`. It is written under another name beside its place, made
//! durable, and renamed into place: whatever is called `step-{N}` and has its three files is
//! complete, and whatever has another name is a leftover that nobody reads.
//!
//! ```text
//! step-500/model.safetensors       parameters by global name
//! step-500/optimizer.safetensors   the optimiser's tensors, as `exp_avg.<parameter>`
//! step-500/state.json              everything that is no tensor
//! ```
//!
//! Here every rank holds the whole state and one of them writes it.

mod durable;
mod error;
mod folder;
mod load;
mod retain;
mod save;
mod state;

pub use error::{CheckpointError, Result};
pub use folder::{latest, leftovers};
pub use load::Checkpoint;
pub use save::save;
pub use state::TrainState;

/// Parameters by global name.
const MODEL_FILE: &str = "model.safetensors";
/// The optimiser's tensors.
const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// Everything that is no tensor.
const STATE_FILE: &str = "state.json";
/// What a checkpoint consists of.
const FILES: [&str; 3] = [MODEL_FILE, OPTIMIZER_FILE, STATE_FILE];

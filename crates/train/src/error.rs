//! Why a job could not go on.

use std::io;
use std::path::{Path, PathBuf};

use trainyard_checkpoint::CheckpointError;
use trainyard_config::ConfigError;
use trainyard_data::DataError;
use trainyard_mesh::MeshError;
use trainyard_nn::NnError;
use trainyard_parallel::ParallelError;
use trainyard_torch::TorchError;

/// The result of anything in this crate.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

/// Why a job could not go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// libtorch or a collective failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
    /// The model failed.
    #[error(transparent)]
    Nn(#[from] NnError),
    /// Samples could not be had.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The config was refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The mesh was refused.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The first rank could not tell from where to go on.
    #[error("nobody knows from where to go on: {0}")]
    Newest(String),
    /// The environment names holders that cannot be used.
    #[error("no copies in peers' memory: {0}")]
    Peers(String),
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Ranks would hold more than they may.
    #[error(
        "a rank would hold {peak} bytes, {} more than training.memory_limit_bytes = {limit}; {advice}",
        peak - limit
    )]
    OverLimit {
        /// The most a rank may hold.
        limit: u64,
        /// The most it would.
        peak: u64,
        /// What would fit.
        advice: String,
    },
    /// No choice of what to recompute stays under the budget.
    #[error(
        "a rank would hold {peak} bytes with every block recomputed, more than \
         activation_checkpoint.memory_budget_bytes = {budget}: raise it by {}, shard over more \
         ranks, or lower training.local_batch_size",
        peak - budget
    )]
    OverBudget {
        /// The most a rank may hold.
        budget: u64,
        /// The least it would.
        peak: u64,
    },
    /// A tensor that is not part of this optimiser's state.
    #[error(
        "optimiser state {name} belongs to no parameter of this job: \
         resume with the model and the optimiser that wrote it"
    )]
    UnknownState {
        /// Its name in the checkpoint.
        name: String,
    },
    /// A parameter whose state is there only in part.
    #[error("optimiser state {name} is missing, though other state of its parameter is there")]
    MissingState {
        /// Its name in the checkpoint.
        name: String,
    },
    /// A tensor of state with another shape or kind.
    #[error("optimiser state {name} is {found}, expected {expected}")]
    StateMismatch {
        /// Its name in the checkpoint.
        name: String,
        /// What this optimiser holds.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A tensor of a kind that files have no word for.
    #[error("{name} is {kind:?}, which cannot be saved")]
    StateKind {
        /// The tensor.
        name: String,
        /// Its kind.
        kind: tch::Kind,
    },
    /// A tensor in a file of a type that nothing computes in.
    #[error("{name} is {dtype}, which nothing here computes in: convert it first")]
    StateDtype {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: String,
    },
    /// A tensor in a file of another shape than the job's.
    #[error("{name} has shape {found:?}, expected {expected:?}: load the model that was saved")]
    StateShape {
        /// The tensor.
        name: String,
        /// The file's.
        found: Vec<usize>,
        /// The job's.
        expected: Vec<usize>,
    },
    /// A strategy failed.
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    /// The data a config asks for cannot be had.
    #[error("{0}")]
    Dataset(String),
    /// A trace could not be written.
    #[error("cannot write the trace: {0}")]
    Trace(String),
    /// A pipeline's schedule cannot be made or cannot run.
    #[error("the pipeline's schedule: {0}")]
    Schedule(String),
    /// Signals cannot be listened to.
    #[error("cannot listen to SIGTERM: {0}")]
    Signals(io::Error),
    /// All ranks have saved because one was told to end, and nobody told this one.
    #[error(
        "another machine was told to end, and all ranks have saved; nothing was heard from this machine's \
         launcher for {} s: start the job again, it goes on from there",
        waited.as_secs()
    )]
    LeftBehind {
        /// For how long this rank waited.
        waited: std::time::Duration,
    },
    /// The job is at its end, and what it came to is not in storage.
    #[error(
        "the state after step {step}, the job's last, was not saved, for the reason told above: make room, and \
         start the job again, it goes on from the checkpoint before"
    )]
    NotSaved {
        /// The last step.
        step: u64,
    },
    /// There is nothing to train.
    #[error("the model has no parameters, so there is no gradient to measure")]
    NoParameters,
}

impl TrainError {
    /// Names the file or folder the system refused.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> TrainError + '_ {
        move |source| TrainError::Io {
            path: path.to_owned(),
            source,
        }
    }
}

impl From<tch::TchError> for TrainError {
    fn from(error: tch::TchError) -> Self {
        TrainError::Torch(error.into())
    }
}

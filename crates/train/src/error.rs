//! Errors of training jobs.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use trainyard_checkpoint::CheckpointError;
use trainyard_config::ConfigError;
use trainyard_cost::TooManyStages;
use trainyard_data::DataError;
use trainyard_mesh::MeshError;
use trainyard_nn::NnError;
use trainyard_optim::OptimError;
use trainyard_parallel::ParallelError;
use trainyard_torch::TorchError;

/// The result type of this crate.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

/// Why a training job failed.
#[derive(thiserror::Error)]
pub enum TrainError {
    /// libtorch or a collective failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
    /// The model failed.
    #[error(transparent)]
    Nn(#[from] NnError),
    /// The ranks of a program could not be started, or one of them failed.
    #[error("{0}")]
    Spawn(String),
    /// The dataset or the data loader failed.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The config is not valid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The device mesh is not valid.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The config names a component that the program does not register.
    #[error(
        "{found} names no such component of this program, which {}",
        registers(registered)
    )]
    Unregistered {
        /// The setting or section.
        found: String,
        /// The names of those that exist.
        registered: Vec<String>,
    },
    /// The planner has not chosen degrees.
    #[error(
        "parallelism = \"auto\" is planned by the command `trainyard`: use that, with TRAINYARD_ENGINE set to this program, \
         or set the degrees"
    )]
    NotPlanned,
    /// `training.epochs` of a dataset without an end.
    #[error(
        "training.epochs needs a dataset with an end, and this one has none: use training.steps"
    )]
    EndlessEpochs,
    /// Two components have one name.
    #[error(
        "two components are named {name:?}, in this program or in Trainyard: register one of them by another name"
    )]
    NameTaken {
        /// The name.
        name: String,
    },
    /// Rank 0 could not find the checkpoint to resume from.
    #[error("cannot find the checkpoint to resume from: {0}")]
    ResumeSource(String),
    /// Ranks do not run the same job.
    #[error(
        "rank {} has another {what} than the other ranks: use the same build and the same config on all nodes",
        ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
    )]
    DifferentJobs {
        /// What differs: the config or the program.
        what: &'static str,
        /// The ranks that differ from the majority; all if there is none.
        ranks: Vec<usize>,
    },
    /// The job that saved the checkpoint was another one.
    #[error(
        "cannot resume from the checkpoint of step {step}: this job differs from the one that saved it. {}. Undo the \
         change, start in another job.dump_folder, or allow it with --checkpoint.allow {allow}",
        changes.join("; ")
    )]
    ResumeChanged {
        /// The step of the checkpoint.
        step: u64,
        /// What differs, and what each difference costs.
        changes: Vec<String>,
        /// The value of `checkpoint.allow` that allows them.
        allow: String,
    },
    /// Rank 0 may not use the checkpoint storage.
    #[error("rank 0 cannot use the checkpoint storage: {reason}")]
    StorageRefused {
        /// The error of rank 0.
        reason: String,
        /// Whether a restart would not help.
        is_final: bool,
    },
    /// All checkpoints of the job are damaged.
    #[error(
        "no checkpoint of the job is whole; the warnings above say what is wrong with each. Restore one, or set \
         checkpoint.resume to false or another checkpoint.folder to start from step 1"
    )]
    NoWholeCheckpoint,
    /// Another rank could not load the checkpoint.
    #[error("another rank could not load the checkpoint, and says why")]
    OtherRankFailedToLoad,
    /// The replica servers in the environment cannot be used.
    #[error("cannot use peer checkpoints: {0}")]
    Peers(String),
    /// A file operation failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The peak memory of a rank would exceed the limit.
    #[error(
        "the peak memory of a rank would be {peak} bytes, {} more than training.memory_limit_bytes = {limit}; \
         {advice}",
        peak - limit
    )]
    OverLimit {
        /// The limit of the config, in bytes.
        limit: u64,
        /// The peak memory by dry run, in bytes.
        peak: u64,
        /// Settings that would fit.
        advice: String,
    },
    /// No activation checkpointing plan stays within the budget.
    #[error(
        "the peak memory of a rank would be {peak} bytes with every block recomputed, more than \
         activation_checkpoint.memory_budget_bytes = {budget}: raise it by {}, shard over more \
         ranks, or lower training.local_batch_size",
        peak - budget
    )]
    OverBudget {
        /// The budget of the config, in bytes.
        budget: u64,
        /// The lowest peak memory of any plan, in bytes.
        peak: u64,
    },
    /// A pipeline has more stages than the model has units.
    #[error(transparent)]
    TooManyStages(#[from] TooManyStages),
    /// The optimizer failed, or its saved state is not that of this model.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// A tensor has a dtype that the checkpoint format does not have.
    #[error("cannot save {name}: the checkpoint format has no dtype for {kind:?}")]
    StateKind {
        /// The name of the tensor.
        name: String,
        /// The libtorch dtype.
        kind: tch::Kind,
    },
    /// A tensor in a checkpoint has a dtype that libtorch does not compute in.
    #[error("cannot load {name}: dtype {dtype} is not supported; convert the checkpoint first")]
    StateDtype {
        /// The name of the tensor.
        name: String,
        /// The dtype in the checkpoint.
        dtype: String,
    },
    /// A tensor in a checkpoint has another shape than in the model of this job.
    #[error(
        "{name} has shape {found:?} in the checkpoint, expected {expected:?}: load it into the model that saved it"
    )]
    StateShape {
        /// The name of the tensor.
        name: String,
        /// The shape in the checkpoint.
        found: Vec<usize>,
        /// The shape in this job.
        expected: Vec<usize>,
    },
    /// A parallelism strategy failed.
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    /// The dataset of the config cannot be used.
    #[error("{0}")]
    Dataset(String),
    /// A trace could not be written.
    #[error("cannot write the trace: {0}")]
    Trace(String),
    /// The pipeline schedule cannot be built or is not valid.
    #[error("pipeline schedule: {0}")]
    Schedule(String),
    /// The SIGTERM handler could not be installed.
    #[error("cannot install the SIGTERM handler: {0}")]
    Signals(io::Error),
    /// Another node was preempted and all ranks have saved, but this rank received no SIGTERM itself.
    #[error(
        "another node was preempted and all ranks have saved a checkpoint, but the launcher of this node sent \
         no SIGTERM within {} s: start the job again, it resumes from that checkpoint",
        waited.as_secs()
    )]
    SigtermTimeout {
        /// How long this rank waited.
        waited: std::time::Duration,
    },
    /// The final checkpoint of a job could not be saved to storage.
    #[error(
        "the final checkpoint, of step {step}, was not saved; the error is logged above: fix the storage (for \
         example, free disk space), then start the job again, it resumes from the previous checkpoint"
    )]
    NotSaved {
        /// The last step of the job.
        step: u64,
    },
    /// A checkpoint could not be saved to storage.
    #[error("the checkpoint of step {step} was not saved; the rank that failed logs why")]
    StepNotSaved {
        /// The step.
        step: u64,
    },
    /// The loss or the gradients of a step cannot be used, and the job may not go on without it.
    #[error("{what}. {consequence}. {advice}")]
    BadValues {
        /// The step, its samples, and the ranks.
        what: String,
        /// What is saved.
        consequence: &'static str,
        /// What the user can do.
        advice: &'static str,
    },
    /// The parameter servers of a run, or its workers, cannot go on.
    #[error("parameter servers: {0}")]
    ParameterServer(String),
    /// The steps of a checkpoint are outer steps of another length than those of this run.
    #[error(
        "a step of the checkpoint is {saved} steps of every worker, a step of this run is {own}: use `trainyard run --servers` \
         and the local_updates.sync_steps of the checkpoint, or begin anew with its parameters (`trainyard ckpt convert --to hf`, model.initial_weights)"
    )]
    OtherStepUnit {
        /// The steps of a worker in a step of the checkpoint.
        saved: u64,
        /// The steps of a worker in a step of this run.
        own: u64,
    },
    /// The model has no parameters.
    #[error("the model has no parameters to train")]
    NoParameters,
}

impl TrainError {
    /// Whether the job rejects what it was started with, so that a restart would be rejected too.
    pub fn is_rejection(&self) -> bool {
        matches!(
            self,
            TrainError::ResumeChanged { .. }
                | TrainError::DifferentJobs { .. }
                | TrainError::OtherStepUnit { .. }
                | TrainError::NoWholeCheckpoint
                | TrainError::StorageRefused { is_final: true, .. }
                | TrainError::Checkpoint(CheckpointError::Owned { .. })
        )
    }

    /// Adds the path of a file or directory to an I/O error.
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

/// As [`Display`](fmt::Display): Rust prints this when `main` returns an error, and a user reads it.
impl fmt::Debug for TrainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn registers(names: &[String]) -> String {
    match names {
        [] => "registers none".to_owned(),
        names => format!("registers {}", names.join(", ")),
    }
}

//! What can go wrong in a strategy.

use trainyard_nn::NnError;
use trainyard_torch::TorchError;

use crate::offload::OffloadError;

/// Result of everything in this crate.
pub type Result<T, E = ParallelError> = std::result::Result<T, E>;

/// An error of a strategy, or of what it stands on.
#[derive(Debug, thiserror::Error)]
pub enum ParallelError {
    /// Some parameters took no part in the loss.
    #[error(
        "no gradient for {}: every parameter must take part in the loss on every rank, or set \
         parallelism.find_unused_parameters = true",
        names.join(", ")
    )]
    UnusedParameters {
        /// Their global names.
        names: Vec<String>,
    },
    /// Some parameters belong to no unit, so nothing says when they are needed.
    #[error(
        "{} in no unit of the model: a sharded model needs every trained parameter in one of its \
         units",
        names.join(", ")
    )]
    OutsideUnits {
        /// Their global names.
        names: Vec<String>,
    },
    /// A model without anything to train.
    #[error("the model has no trained parameters to shard; use it as it is")]
    NothingToShard,
    /// A batch cannot be divided as asked.
    #[error("a batch of {rows} rows cannot be divided over {num_replicas} replicas")]
    Indivisible {
        /// Rows in the batch.
        rows: i64,
        /// Replicas there are.
        num_replicas: usize,
    },
    /// A replica's thread ended early.
    #[error("replica {index} ended: {reason}")]
    Replica {
        /// Which one.
        index: usize,
        /// Why.
        reason: String,
    },
    /// From state kept in files.
    #[error(transparent)]
    Offload(#[from] OffloadError),
    /// From the optimiser.
    #[error("the optimiser failed: {reason}")]
    Update {
        /// What it said.
        reason: String,
    },
    /// Offload without sharded parameters.
    #[error("only sharded parameters (stage 3) can be kept in files: use zero_stage = 3")]
    OffloadNeedsStage3,
    /// Offload of a model with experts.
    #[error("states of experts cannot be kept in files yet: use offload = \"none\"")]
    OffloadOfExperts,
    /// A model with fewer units than a pipeline has stages.
    #[error(
        "{num_units} units cannot be cut into {num_stages} stages: use fewer stages, or a deeper model"
    )]
    TooManyStages {
        /// Stages asked for.
        num_stages: usize,
        /// Units there are.
        num_units: usize,
    },
    /// Stages that are not those of the schedule.
    #[error(
        "a schedule for {num_ranks} ranks with {num_stages} stages here was given {given} stages and \
         a group of {group_size}"
    )]
    StagesMisfit {
        /// Ranks of the schedule.
        num_ranks: usize,
        /// Ranks of the group.
        group_size: usize,
        /// Stages this rank has.
        num_stages: usize,
        /// Stages it was given.
        given: usize,
    },
    /// Work of a stage another rank holds, or that has not begun.
    #[error("stage {stage} has nothing to do here: the schedule was not checked")]
    ForeignStage {
        /// The stage.
        stage: usize,
    },
    /// Another number of micro-batches than the schedule was made for.
    #[error("a schedule of {expected} micro-batches was given {given}")]
    Microbatches {
        /// Of the schedule.
        expected: usize,
        /// Of the step.
        given: usize,
    },
    /// A pipeline asked to run one pass.
    #[error("a pipeline runs whole steps, since micro-batches overlap: call run_step")]
    WholeStepsOnly,
    /// From the model.
    #[error(transparent)]
    Nn(#[from] NnError),
    /// From libtorch or a collective.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl From<tch::TchError> for ParallelError {
    fn from(e: tch::TchError) -> Self {
        ParallelError::Torch(e.into())
    }
}

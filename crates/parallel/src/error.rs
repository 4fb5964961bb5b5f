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

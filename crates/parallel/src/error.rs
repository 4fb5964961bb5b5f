//! What can go wrong in a strategy.

use trainyard_nn::NnError;
use trainyard_torch::TorchError;

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

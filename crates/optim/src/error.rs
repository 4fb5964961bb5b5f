//! Errors of optimizers.

use trainyard_nn::NnError;
use trainyard_torch::TorchError;

/// The result type of this crate.
pub type Result<T, E = OptimError> = std::result::Result<T, E>;

/// Why an optimizer failed.
#[derive(Debug, thiserror::Error)]
pub enum OptimError {
    /// libtorch or a collective failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
    /// A parameter could not be read.
    #[error(transparent)]
    Nn(#[from] NnError),
    /// Saved state of a parameter that the optimizer does not have.
    #[error(
        "optimizer state {name} does not belong to any parameter of this job: \
         resume with the model and the optimizer that wrote it"
    )]
    UnknownState {
        /// The name of the state tensor.
        name: String,
    },
    /// Some of the state tensors of a parameter are missing.
    #[error("optimizer state {name} is missing, but other state of its parameter is present")]
    MissingState {
        /// The name of the state tensor.
        name: String,
    },
    /// A saved state tensor has another shape or type.
    #[error("optimizer state {name} is {found}, expected {expected}")]
    StateMismatch {
        /// The name of the state tensor.
        name: String,
        /// Dtype and shape of this optimizer's.
        expected: String,
        /// Dtype and shape of the saved one.
        found: String,
    },
}

impl From<tch::TchError> for OptimError {
    fn from(error: tch::TchError) -> OptimError {
        OptimError::Torch(error.into())
    }
}

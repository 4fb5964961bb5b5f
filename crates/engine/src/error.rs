//! Why a command failed.

use std::path::PathBuf;

/// Result of a command.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Training failed.
    #[error(transparent)]
    Train(#[from] trainyard_train::TrainError),
    /// Ranks could not be started, or one failed.
    #[error(transparent)]
    Launch(#[from] trainyard_elastic::LaunchError),
    /// A rank failed; the report names it.
    #[error("{0}")]
    Rank(String),
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A result of another process made no sense.
    #[error("cannot read {what}: {reason}")]
    Unreadable {
        /// Which result.
        what: String,
        /// Why.
        reason: String,
    },
}

macro_rules! through_train {
    ($($source:ty),* $(,)?) => {$(
        impl From<$source> for EngineError {
            fn from(error: $source) -> Self {
                EngineError::Train(error.into())
            }
        }
    )*};
}

through_train!(
    trainyard_checkpoint::CheckpointError,
    trainyard_config::ConfigError,
    trainyard_data::DataError,
    trainyard_mesh::MeshError,
    trainyard_nn::NnError,
    trainyard_torch::TorchError,
);

impl From<tch::TchError> for EngineError {
    fn from(error: tch::TchError) -> Self {
        EngineError::Train(trainyard_torch::TorchError::from(error).into())
    }
}

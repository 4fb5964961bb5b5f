//! Errors of engine commands.

use std::path::PathBuf;

/// The result type of a command.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Training failed.
    #[error(transparent)]
    Train(#[from] trainyard_train::TrainError),
    /// The launcher could not start the ranks.
    #[error(transparent)]
    Launch(#[from] trainyard_launcher::LaunchError),
    /// A rank failed; the message names it.
    #[error("{0}")]
    Rank(String),
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A file of another rank cannot be parsed, or a trace cannot be written.
    #[error("cannot read or write {what}: {reason}")]
    Unreadable {
        /// The path of the file.
        what: String,
        /// The reason.
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

//! Errors of engine commands.

use std::path::PathBuf;
use std::process::ExitCode;

use trainyard_launcher::{BAD_VALUES, REJECTED};
use trainyard_train::TrainError;

/// The result type of a command.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Training failed.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// The launcher could not start the ranks.
    #[error(transparent)]
    Launch(#[from] trainyard_launcher::LaunchError),
    /// A rank failed; the message names it.
    #[error("{0}")]
    Rank(String),
    /// A model cannot be planned.
    #[error("{0}")]
    Plan(String),
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

impl EngineError {
    /// The exit code of the process.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            EngineError::Train(TrainError::BadValues { .. }) => BAD_VALUES.into(),
            EngineError::Train(error) if error.is_rejection() => REJECTED.into(),
            _ => ExitCode::FAILURE,
        }
    }
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

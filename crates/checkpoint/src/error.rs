//! Why a checkpoint could not be written or read.

use std::io;
use std::path::{Path, PathBuf};

use trainyard_nn::NnError;

/// The result of anything in this crate.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system refused.
    #[error("checkpoint {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file of tensors could not be written, or is not what the job expects.
    #[error("checkpoint: {0}")]
    Tensors(#[from] NnError),
    /// The state file is not in the format.
    #[error("checkpoint {}: not a state file: {source}; use an older checkpoint", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The state file is of a format this version does not know.
    #[error(
        "checkpoint {}: format version {found}, but this program reads {known}; use the version that wrote it",
        path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The version it names.
        found: u64,
        /// The version that is understood.
        known: u64,
    },
    /// The optimiser has a tensor of a kind that is not saved.
    #[error("checkpoint: {name} is {kind:?}: optimiser state must be floating or Int64")]
    Kind {
        /// The tensor.
        name: String,
        /// Its kind.
        kind: tch::Kind,
    },
}

impl CheckpointError {
    /// Names the file or folder the system refused.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError + '_ {
        move |source| CheckpointError::Io {
            path: path.to_owned(),
            source,
        }
    }
}

impl From<tch::TchError> for CheckpointError {
    fn from(error: tch::TchError) -> Self {
        CheckpointError::Tensors(error.into())
    }
}

//! What can go wrong between a dataset and a batch.

use std::path::{Path, PathBuf};

/// Why samples could not be had.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{}: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A sample that the source does not have.
    #[error("sample {index} was asked for, but the source has {len}")]
    OutOfRange {
        /// The sample asked for.
        index: u64,
        /// How many there are.
        len: u64,
    },
    /// A setting that no source, sampler or loader can have.
    #[error("{0}")]
    Setting(String),
    /// Samples that do not stack into one batch.
    #[error("cannot stack samples into a batch: {0}")]
    Collate(String),
    /// libtorch refused to make a tensor.
    #[error("cannot make a tensor of a batch: {0}")]
    Tensor(#[from] tch::TchError),
    /// A loading thread panicked.
    #[error("a loading thread ended before its work was done: see the panic message above")]
    WorkerLost,
}

impl DataError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        DataError::Io {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn format(path: &Path, reason: impl Into<String>) -> Self {
        DataError::Format {
            path: path.to_owned(),
            reason: reason.into(),
        }
    }
}

//! Errors of datasets and data loading.

use std::path::{Path, PathBuf};

use trainyard_torch::TorchError;

/// Why data could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A file does not have the expected format.
    #[error("{}: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A sample index is beyond the end of the dataset.
    #[error("sample index {index} is out of range: the dataset has {len} samples")]
    OutOfRange {
        /// The requested index.
        index: u64,
        /// The number of samples.
        len: u64,
    },
    /// The index of prepared token files cannot be read.
    #[error(transparent)]
    Index(#[from] trainyard_tokenize::TokenizeError),
    /// A setting of a source, sampler or loader is not valid.
    #[error("{0}")]
    Setting(String),
    /// Samples cannot be stacked into one batch.
    #[error("cannot collate samples into a batch: {0}")]
    Collate(String),
    /// libtorch could not create a tensor.
    #[error("cannot create a batch tensor: {0}")]
    Tensor(TorchError),
    /// A batch cannot be copied to the device.
    #[error("cannot copy a batch to the device: {0}")]
    Device(#[from] TorchError),
    /// A data loader thread panicked.
    #[error("a data loader thread panicked: see the panic message above")]
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

impl From<tch::TchError> for DataError {
    fn from(error: tch::TchError) -> DataError {
        DataError::Tensor(error.into())
    }
}

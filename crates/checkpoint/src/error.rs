//! Why a checkpoint could not be written or read.

use std::io;

use crate::store::Trouble;

/// The result of anything in this crate.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// Why a checkpoint could not be written or read. Every error names the file it is about.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system, or the store, refused.
    #[error("checkpoint {path}: {source}")]
    Io {
        /// The file or folder.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// Nothing can be stored at such a place.
    #[error("checkpoint {place}: {reason}")]
    Place {
        /// The place, as it was written.
        place: String,
        /// What is wrong with it, and what to write.
        reason: String,
    },
    /// The server of a bucket did not do what it was asked.
    #[error("checkpoint {path}: {trouble} ({source})")]
    Remote {
        /// The file or folder, as a URL.
        path: String,
        /// What was wrong, and what to do.
        trouble: Trouble,
        /// What was asked, and what the server said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file is not in its format.
    #[error("checkpoint {path}: {reason}; use an older checkpoint")]
    Format {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file is not what was written.
    #[error("checkpoint {path}: damaged: {what}; use an older checkpoint")]
    Damaged {
        /// The file.
        path: String,
        /// What differs.
        what: String,
    },
    /// A file is of a format this version does not know.
    #[error(
        "checkpoint {path}: format version {found}, but this program reads up to {known}; use the \
         version that wrote it"
    )]
    Version {
        /// The file.
        path: String,
        /// The version it names.
        found: u64,
        /// The latest version that is understood.
        known: u64,
    },
    /// The checkpoint is of another model.
    #[error(
        "checkpoint {path}: not of this job: missing [{}], unexpected [{}]",
        missing.join(", "), unexpected.join(", ")
    )]
    Names {
        /// The checkpoint.
        path: String,
        /// Wanted but not there.
        missing: Vec<String>,
        /// There but not wanted.
        unexpected: Vec<String>,
    },
    /// A tensor is not what the job expects.
    #[error("checkpoint {path}: {name}: {reason}")]
    Tensor {
        /// The checkpoint.
        path: String,
        /// The tensor.
        name: String,
        /// What differs.
        reason: String,
    },
    /// Another rank could not write its part, so there is no checkpoint.
    #[error("checkpoint {path}: rank {rank} failed: {reason}")]
    Rank {
        /// The checkpoint.
        path: String,
        /// Who failed.
        rank: usize,
        /// Why.
        reason: String,
    },
}

impl CheckpointError {
    /// Names the file or folder the system refused.
    pub(crate) fn io(path: impl Into<String>) -> impl FnOnce(io::Error) -> CheckpointError {
        let path = path.into();
        move |source| CheckpointError::Io { path, source }
    }

    pub(crate) fn format(path: &str, reason: impl ToString) -> CheckpointError {
        CheckpointError::Format {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn tensor(path: &str, name: &str, reason: impl ToString) -> CheckpointError {
        CheckpointError::Tensor {
            path: path.to_owned(),
            name: name.to_owned(),
            reason: reason.to_string(),
        }
    }
}

//! Errors of writing and reading checkpoints.

use std::io;

use crate::store::RemoteErrorKind;

/// The result type of this crate.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// Why a checkpoint could not be written or read. Every variant names the path it is about.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system, or a peer's store, reported an I/O error.
    #[error("checkpoint {path}: {source}")]
    Io {
        /// The file or directory.
        path: String,
        /// The underlying error.
        source: io::Error,
    },
    /// The path or URL of a store is not valid.
    #[error("checkpoint {location}: {reason}")]
    Location {
        /// The path or URL as the user wrote it.
        location: String,
        /// What is wrong with it, and what to write instead.
        reason: String,
    },
    /// A request to an object store failed.
    #[error("checkpoint {path}: {kind} ({source})")]
    Remote {
        /// The URL of the file or directory.
        path: String,
        /// The kind of failure; its text includes advice.
        kind: RemoteErrorKind,
        /// The request and the server's response.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file does not follow its format.
    #[error("checkpoint {path}: {reason}; use an older checkpoint")]
    Format {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The content of a file is not what was written.
    #[error("checkpoint {path}: corrupted: {reason}; use an older checkpoint")]
    Corrupted {
        /// The file.
        path: String,
        /// What differs.
        reason: String,
    },
    /// The checkpoint has a format version that this build does not read.
    #[error(
        "checkpoint {path}: format version {found} is not supported: this build reads and writes version \
         {supported} only; {}",
        version_advice(*found, *supported)
    )]
    Version {
        /// The file that names the version.
        path: String,
        /// The version of the checkpoint.
        found: u64,
        /// The only version that this build reads and writes.
        supported: u64,
    },
    /// The checkpoint does not have the tensors of this job's model.
    #[error(
        "checkpoint {path}: its tensors are not those of this job: missing [{}], unexpected [{}]",
        missing.join(", "), unexpected.join(", ")
    )]
    Names {
        /// The checkpoint.
        path: String,
        /// Names that the job expects and the checkpoint lacks.
        missing: Vec<String>,
        /// Names that the checkpoint has and the job does not expect.
        unexpected: Vec<String>,
    },
    /// A tensor does not have the type, the shape or the chunks that it must have.
    #[error("checkpoint {path}: {name}: {reason}")]
    Tensor {
        /// The checkpoint.
        path: String,
        /// The tensor.
        name: String,
        /// What differs.
        reason: String,
    },
    /// Another job that runs uses the checkpoint folder.
    #[error(
        "checkpoint folder {path} is in use by {owner}: stop that job, or choose another job.dump_folder or \
         checkpoint.folder"
    )]
    Owned {
        /// The folder.
        path: String,
        /// The other job.
        owner: String,
    },
    /// Another job has become the owner of the checkpoint folder.
    #[error(
        "checkpoint folder {path} now belongs to {owner}: this job neither saves nor deletes there any more; stop one \
         of the two"
    )]
    Fenced {
        /// The folder.
        path: String,
        /// The other job.
        owner: String,
    },
    /// A rank could not write its file, so the save was abandoned.
    #[error("checkpoint {path}: rank {rank} failed: {reason}")]
    Rank {
        /// The checkpoint.
        path: String,
        /// The rank that failed.
        rank: usize,
        /// Why it failed.
        reason: String,
    },
}

/// What a user can do about a checkpoint of another format version.
fn version_advice(found: u64, supported: u64) -> &'static str {
    if found < supported {
        "convert it to Hugging Face safetensors with the build that wrote it (`trainyard ckpt convert`) \
             and load its weights with checkpoint.initial_load_path, or finish the job with that build"
    } else {
        "use the newer build that wrote it"
    }
}

impl CheckpointError {
    /// Whether the checkpoint itself is damaged or incomplete, so that an older one may help. A checkpoint of another
    /// model, or a storage that cannot be reached, is no such case.
    pub fn is_damage(&self) -> bool {
        match self {
            CheckpointError::Format { .. }
            | CheckpointError::Corrupted { .. }
            | CheckpointError::Tensor { .. } => true,
            CheckpointError::Io { source, .. } => {
                let kind = source.kind();
                matches!(kind, io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof)
            }
            CheckpointError::Remote { kind, .. } => *kind == RemoteErrorKind::NoFile,
            CheckpointError::Location { .. }
            | CheckpointError::Version { .. }
            | CheckpointError::Names { .. }
            | CheckpointError::Owned { .. }
            | CheckpointError::Fenced { .. }
            | CheckpointError::Rank { .. } => false,
        }
    }

    /// Adds the path of the file or directory to an I/O error.
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

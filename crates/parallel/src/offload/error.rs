//! What can go wrong with state kept in files.

use std::fmt;
use std::io;
use std::path::PathBuf;

use trainyard_torch::TorchError;

/// Result of everything in this module.
pub type Result<T, E = OffloadError> = std::result::Result<T, E>;

/// Why state could not be kept in a file, or not be had back.
#[derive(Debug, thiserror::Error)]
pub enum OffloadError {
    /// The file could not be made.
    #[error("offload {}: cannot create it: {source}", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another process holds the file.
    #[error(
        "offload {}: another process uses it; give every job a folder of its own",
        path.display()
    )]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The disk, or the quota on it, has no room.
    #[error(
        "offload {}: no room for {needed} bytes{}; free some or name a folder on a larger disk",
        path.display(),
        available.map(|bytes| format!(", {bytes} are available")).unwrap_or_default()
    )]
    DiskFull {
        /// The file.
        path: PathBuf,
        /// Bytes that were to be allocated or written.
        needed: u64,
        /// Bytes the file system has left, if it says.
        available: Option<u64>,
    },
    /// The system refused a read or a write.
    #[error(
        "offload {}: cannot {operation} record {record} ({num_bytes} bytes at {offset}): {source}",
        path.display()
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        operation: Operation,
        /// Number of the record.
        record: usize,
        /// Where it begins in the file.
        offset: u64,
        /// How long it is.
        num_bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The file does not hold what was written.
    #[error(
        "offload {}: record {record} ({num_bytes} bytes at {offset}) is torn: {cause}; \
         go on from the last checkpoint",
        path.display()
    )]
    Torn {
        /// The file.
        path: PathBuf,
        /// Number of the record.
        record: usize,
        /// Where it begins in the file.
        offset: u64,
        /// How long it is.
        num_bytes: u64,
        /// How that is known.
        cause: Tear,
    },
    /// Every staging buffer is in the caller's hands.
    #[error(
        "offload: all {num_buffers} staging buffers are taken: write or drop one first, or allow more"
    )]
    NoBuffer {
        /// How many there are.
        num_buffers: usize,
    },
    /// The record is in the caller's hands already.
    #[error("offload: record {record} is taken already: write or drop it first")]
    Taken {
        /// Number of the record.
        record: usize,
    },
    /// No record has that number.
    #[error("offload: there is no record {record} among {num_records}")]
    NoSuchRecord {
        /// The number.
        record: usize,
        /// How many records there are.
        num_records: usize,
    },
    /// What was to be written was taken from another file.
    #[error("offload {}: record {record} was taken from another file", path.display())]
    Foreign {
        /// The file it was to be written to.
        path: PathBuf,
        /// Its number there.
        record: usize,
    },
    /// A thread that reads or writes panicked: a bug of ours.
    #[error("offload {}: it panicked: {message}", path.display())]
    Panicked {
        /// The file.
        path: PathBuf,
        /// The panic's message.
        message: String,
    },
    /// From libtorch.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl From<tch::TchError> for OffloadError {
    fn from(e: tch::TchError) -> Self {
        OffloadError::Torch(e.into())
    }
}

/// What was done with a record when the system refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// From the file.
    Read,
    /// To the file.
    Write,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::Read => "read",
            Operation::Write => "write",
        })
    }
}

/// How a torn record was noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tear {
    /// The file ends before the record does.
    Short,
    /// Its bytes are not those that were written.
    Checksum {
        /// CRC-32C of what was written.
        written: u32,
        /// CRC-32C of what was read.
        found: u32,
    },
    /// The last write failed, which an earlier error told.
    WriteFailed,
}

impl fmt::Display for Tear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tear::Short => write!(f, "the file ends before it"),
            Tear::Checksum { written, found } => {
                write!(
                    f,
                    "written with checksum {written:08x}, read with {found:08x}"
                )
            }
            Tear::WriteFailed => write!(f, "its last write failed"),
        }
    }
}

//! Errors of offloading to files.

use std::fmt;
use std::io;
use std::path::PathBuf;

use trainyard_torch::TorchError;

/// Result type of this module.
pub type Result<T, E = OffloadError> = std::result::Result<T, E>;

/// Why state could not be offloaded, or not be read back.
#[derive(Debug, thiserror::Error)]
pub enum OffloadError {
    /// The file could not be created.
    #[error("cannot create offload file {}: {source}", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// Another process uses the file.
    #[error(
        "offload file {} is in use by another process; use a separate directory for each job",
        path.display()
    )]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The disk or the quota is full.
    #[error(
        "offload file {}: no space left for {needed} bytes{}; free space or choose a directory on a larger disk",
        path.display(),
        available.map(|bytes| format!(" ({bytes} available)")).unwrap_or_default()
    )]
    DiskFull {
        /// The file.
        path: PathBuf,
        /// Bytes to allocate or write.
        needed: u64,
        /// Bytes available on the file system, if known.
        available: Option<u64>,
    },
    /// A read or a write failed.
    #[error(
        "cannot {operation} record {record} ({num_bytes} bytes at offset {offset}) of offload file {}: {source}",
        path.display()
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// The operation that failed.
        operation: Operation,
        /// Index of the record.
        record: usize,
        /// Offset of the record in the file.
        offset: u64,
        /// Length of the record.
        num_bytes: u64,
        /// The I/O error.
        source: io::Error,
    },
    /// The file does not contain what was written.
    #[error(
        "record {record} ({num_bytes} bytes at offset {offset}) of offload file {} is corrupt: {cause}; \
         restart from the last checkpoint",
        path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Index of the record.
        record: usize,
        /// Offset of the record in the file.
        offset: u64,
        /// Length of the record.
        num_bytes: u64,
        /// How the corruption was detected.
        cause: Corruption,
    },
    /// The caller holds all staging buffers.
    #[error(
        "all {num_buffers} offload staging buffers are in use; write or drop one first, or configure more"
    )]
    NoBuffer {
        /// Number of buffers.
        num_buffers: usize,
    },
    /// The caller already holds the record.
    #[error("offload record {record} is already taken; write or drop it first")]
    AlreadyTaken {
        /// Index of the record.
        record: usize,
    },
    /// There is no such record.
    #[error("offload record {record} is out of range for {num_records} records")]
    NoSuchRecord {
        /// The index.
        record: usize,
        /// Number of records.
        num_records: usize,
    },
    /// A record was written to another file than it was taken from.
    #[error("record {record} was not taken from offload file {}", path.display())]
    WrongFile {
        /// The file that was to be written.
        path: PathBuf,
        /// Index of the record in its own file.
        record: usize,
    },
    /// An I/O thread panicked, which is a bug.
    #[error("the I/O thread of offload file {} panicked: {message}", path.display())]
    Panicked {
        /// The file.
        path: PathBuf,
        /// The panic message.
        message: String,
    },
    /// An error of libtorch.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl From<tch::TchError> for OffloadError {
    fn from(e: tch::TchError) -> Self {
        OffloadError::Torch(e.into())
    }
}

/// An I/O operation on a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Reading from the file.
    Read,
    /// Writing to the file.
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

/// How a corrupt record was detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Corruption {
    /// The file ends before the record does.
    Truncated,
    /// The checksum differs from that of the last write.
    ChecksumMismatch {
        /// CRC-32C of what was written.
        written: u32,
        /// CRC-32C of what was read.
        found: u32,
    },
    /// The last write failed, which an earlier error reported.
    WriteFailed,
}

impl fmt::Display for Corruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Corruption::Truncated => write!(f, "the file is truncated"),
            Corruption::ChecksumMismatch { written, found } => {
                write!(
                    f,
                    "checksum mismatch, wrote {written:08x}, read {found:08x}"
                )
            }
            Corruption::WriteFailed => write!(f, "its last write failed"),
        }
    }
}

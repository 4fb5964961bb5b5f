//! Errors of writing and reading traces.

use std::{io, path::PathBuf};

use crate::PytorchError;

/// Why a trace could not be written, read or parsed.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A file could not be written.
    #[error("cannot write the trace {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The underlying error.
        source: io::Error,
    },
    /// A file or directory could not be read.
    #[error("cannot read the trace {}: {source}", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The underlying error.
        source: io::Error,
    },
    /// A file is not a trace that Trainyard wrote.
    #[error("{} is not a trace written by Trainyard: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A file is a trace of PyTorch's profiler or a dump of its Flight Recorder, but cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Pytorch {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: PytorchError,
    },
    /// A file has none of the formats that we read.
    #[error(
        "{} is neither a trace written by Trainyard, nor one of PyTorch's profiler (Chrome trace, may be compressed with gzip), nor a dump of PyTorch's Flight Recorder (pickle or JSON)", path.display()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// Why it is not JSON, if it is not.
        source: Option<serde_json::Error>,
    },
    /// A file or directory has no events to summarize.
    #[error("{} has no events of any rank; name a trace file, or a directory of them: rank0.json, rank1.json, ... of Trainyard, or *.pt.trace.json, dump_0, dump_1, ... of PyTorch", path.display())]
    Empty {
        /// The file or directory.
        path: PathBuf,
    },
    /// Two files have events of the same rank.
    #[error("rank {rank} is in {} and in {}; summarize one run at a time", first.display(), second.display())]
    DuplicateRank {
        /// The rank.
        rank: usize,
        /// The file read first.
        first: PathBuf,
        /// The file read later.
        second: PathBuf,
    },
    /// A name is not one of the variants of an enum.
    #[error("`{name}` is not a valid {what}; choose one of {known}")]
    UnknownName {
        /// What the name should have named.
        what: &'static str,
        /// The name.
        name: String,
        /// All valid names.
        known: String,
    },
}

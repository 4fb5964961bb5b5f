//! Why a trace could not be written or read.

use std::{io, path::PathBuf};

/// A trace that could not be written, read or understood.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A file could not be written.
    #[error("cannot write the trace {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file or folder could not be read.
    #[error("cannot read the trace {}: {source}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file is no trace of ours.
    #[error("{} is no trace written by Trainyard: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What the reader stumbled over.
        source: serde_json::Error,
    },
    /// A file or folder holds nothing to summarise.
    #[error("{} holds no events of any rank; name a trace file, or a folder with rank0.json, rank1.json, ...", path.display())]
    Empty {
        /// The file or folder.
        path: PathBuf,
    },
    /// Two files claim the same rank.
    #[error("rank {rank} is in {} and again in {}; summarise one run at a time", first.display(), second.display())]
    DuplicateRank {
        /// The rank.
        rank: usize,
        /// The file read first.
        first: PathBuf,
        /// The file read later.
        second: PathBuf,
    },
    /// A name that is none of the known ones.
    #[error("`{name}` is no {what}; known are {known}")]
    UnknownName {
        /// What was to be named.
        what: &'static str,
        /// The name.
        name: String,
        /// The names there are.
        known: String,
    },
}

//! Errors of tokenization.

use std::io;
use std::path::{Path, PathBuf};

/// The result type of this crate.
pub type Result<T, E = TokenizeError> = std::result::Result<T, E>;

/// Why the inputs could not be tokenized.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    /// The operating system reported an I/O error.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The underlying error.
        source: io::Error,
    },
    /// A line of a text file is not a valid document.
    #[error("{}: byte {offset}: {reason}", path.display())]
    Line {
        /// The input file.
        path: PathBuf,
        /// The byte offset of the line.
        offset: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// A Parquet file cannot be read.
    #[error("{}: {reason}", path.display())]
    Parquet {
        /// The input file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The tokenizer cannot be used.
    #[error("{}: {reason}", path.display())]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A prepared file is not as it was written.
    #[error("{}: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The output directory has token files of other inputs or options.
    #[error(
        "{} has token files of other inputs or another tokenizer: choose another --output, or delete it",
        path.display()
    )]
    OtherSettings {
        /// The output directory.
        path: PathBuf,
    },
}

impl TokenizeError {
    pub(crate) fn damaged(path: &Path, reason: String) -> TokenizeError {
        TokenizeError::Damaged {
            path: path.to_owned(),
            reason,
        }
    }

    /// Adds the path of the file or directory to an I/O error.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> TokenizeError {
        let path = path.to_owned();
        move |source| TokenizeError::Io { path, source }
    }
}

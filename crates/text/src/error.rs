//! Why text could not be turned into tokens.

use std::io;
use std::path::{Path, PathBuf};

/// The result of anything in this crate.
pub type Result<T, E = TextError> = std::result::Result<T, E>;

/// Why text could not be turned into tokens.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A line is no document.
    #[error("{}: byte {at}: {reason}", path.display())]
    Line {
        /// The input.
        path: PathBuf,
        /// Where the line begins.
        at: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// A Parquet file cannot be read.
    #[error("{}: {reason}", path.display())]
    Parquet {
        /// The input.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The tokenizer cannot be used.
    #[error("{}: {reason}", path.display())]
    Tokenizer {
        /// Its file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The folder holds tokens of something else.
    #[error(
        "{} was made with other inputs or another tokenizer: use another --output, or delete it",
        path.display()
    )]
    OtherSettings {
        /// The folder.
        path: PathBuf,
    },
}

impl TextError {
    /// Names the file or folder the system refused.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> TextError {
        let path = path.to_owned();
        move |source| TextError::Io { path, source }
    }
}

//! Text into token files, once, before training.
//!
//! Inputs are cut into pieces at line ends. Every piece becomes one token file, made under another name
//! and renamed: what has its name is whole, and a run that was interrupted goes on with the pieces that
//! are missing. Which files come out depends on the inputs alone, not on how many threads there were.
//!
//! ```text
//! out/settings.json            what the files were made of
//! out/00000-00000.bin          the tokens of the first piece of the first input
//! out/index.json               all files in order, with their numbers of tokens and documents
//! ```

mod error;
mod index;
mod pieces;
mod prepare;
mod token_file;

pub use error::{Result, TextError};
pub use index::{INDEX, Index, Shard};
pub use pieces::{PIECE, Piece, pieces};
pub use prepare::{Options, Summary, prepare};
pub use token_file::{HEADER, Width, header, read_header};

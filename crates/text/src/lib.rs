//! Text into token files, once, before training.
//!
//! Inputs are cut into pieces: text at line ends, Parquet into its row groups. Every piece becomes one token file, made under another name
//! and renamed: what has its name is whole, and a run that was interrupted goes on with the pieces that
//! are missing. Which files come out depends on the inputs alone, not on how many threads there were.
//!
//! ```text
//! out/settings.json            what the files were made of
//! out/00000-00000.bin          the tokens of the first piece of the first input
//! out/index.json               all files in order, with their numbers of tokens and documents
//! ```

mod caught;
mod error;
mod footer;
mod index;
mod pages;
mod pieces;
mod prepare;
mod put;
mod row_group;
mod thrift;
mod token_file;
mod token_writer;

pub use error::{Result, TextError};
pub use index::{INDEX, Index, Shard};
pub use pieces::{PIECE, Part, Piece, pieces};
pub use prepare::{Options, Summary, prepare};
pub use row_group::{RowGroup, row_groups};
pub use token_file::{HEADER, Width, header, read_header};

//! Offline tokenization: text and Parquet files into token files, once before training.
//!
//! The inputs are divided into shards: text at line ends or by file, Parquet by row group. Every input shard becomes
//! one token file, which is written under a temporary name and renamed: a file with its final name is
//! complete, and an interrupted run resumes with the missing shards. The token files depend only on the
//! inputs, not on the number of threads.
//!
//! ```text
//! out/settings.json            the inputs and options that the files were made from
//! out/00000-00000.bin          the tokens of the first shard of the first input
//! out/index.json               all token files in order, with their numbers of tokens and documents, and digests
//! ```

#[cfg(feature = "prepare")]
mod catch_panic;
mod error;
#[cfg(feature = "prepare")]
mod folder;
#[cfg(feature = "prepare")]
mod footer;
mod index;
#[cfg(feature = "prepare")]
mod input_shard;
#[cfg(feature = "prepare")]
mod pages;
#[cfg(feature = "prepare")]
mod prepare;
#[cfg(feature = "prepare")]
mod row_group;
#[cfg(feature = "prepare")]
mod thrift;
mod token_file;
#[cfg(feature = "prepare")]
mod token_writer;
mod verify;
#[cfg(feature = "prepare")]
mod write_atomic;

pub use error::{Result, TokenizeError};
#[cfg(feature = "prepare")]
pub use folder::files_in;
pub use index::{INDEX_FILE, Index, Shard};
#[cfg(feature = "prepare")]
pub use input_shard::{InputRange, InputShard, SHARD_BYTES, input_shards};
#[cfg(feature = "prepare")]
pub use prepare::{Documents, Options, Summary, prepare};
#[cfg(feature = "prepare")]
pub use row_group::{RowGroup, row_groups};
pub use token_file::{HEADER_BYTES, Width, header, read_header};
pub use verify::verify;

//! The index of a directory of token files.

use serde::{Deserialize, Serialize};

/// The file name of the index.
pub const INDEX_FILE: &str = "index.json";

/// All token files of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// The size of the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// The token files, in the order of the input text.
    pub shards: Vec<Shard>,
}

/// One token file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// The name of the file.
    pub file: String,
    /// The number of tokens in the file.
    pub num_tokens: u64,
    /// The number of documents in the file.
    pub num_documents: u64,
}

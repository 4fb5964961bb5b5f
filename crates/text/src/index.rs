//! Which token files there are, in the order of the text.

use serde::{Deserialize, Serialize};

/// Its name in the folder.
pub const INDEX: &str = "index.json";

/// All token files of a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// Tokens the tokenizer knows.
    pub vocab_size: usize,
    /// In order.
    pub shards: Vec<Shard>,
}

/// One token file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Its name.
    pub file: String,
    /// How many tokens it has.
    pub num_tokens: u64,
    /// Of how many documents.
    pub num_documents: u64,
}

//! The index of a directory of token files.

use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Result, TokenizeError};

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
    /// The BLAKE3 digest of the whole file, in hexadecimal.
    pub digest: String,
}

impl Index {
    /// Reads the index of a directory. It names files of that directory only.
    pub fn read(dir: &Path) -> Result<Index> {
        let path = dir.join(INDEX_FILE);
        let text = fs::read(&path).map_err(TokenizeError::io(&path))?;
        let index: Index = serde_json::from_slice(&text)
            .map_err(|error| TokenizeError::damaged(&path, error.to_string()))?;
        match index.shards.iter().find(|shard| !shard.is_file_name()) {
            None => Ok(index),
            Some(shard) => Err(TokenizeError::damaged(
                &path,
                format!(
                    "{:?} is not the name of a file in this directory",
                    shard.file
                ),
            )),
        }
    }

    /// The token files, in order.
    pub fn paths(&self, dir: &Path) -> Vec<PathBuf> {
        let files = self.shards.iter();
        files.map(|shard| dir.join(&shard.file)).collect()
    }
}

impl Shard {
    fn is_file_name(&self) -> bool {
        let mut components = Path::new(&self.file).components();
        matches!(components.next(), Some(Component::Normal(name)) if name == self.file.as_str())
            && components.next().is_none()
    }
}

//! Tokenized datasets: one file, or a directory of shards.
//!
//! `trainyard data prepare` writes them; the crate `trainyard-tokenize` defines the file format.
//!
//! Samples are read with positional reads. Memory-mapping would save a copy of a few kilobytes per sample,
//! but it is unsafe (a file that shrinks kills the process), and both use the page cache.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use trainyard_tokenize::{HEADER_BYTES, INDEX_FILE, Index, Width, header, read_header};

use crate::DataError;
use crate::source::{Sample, Source, check_index};

/// A tokenized dataset, split into sequences of equal length.
#[derive(Debug)]
pub struct TokenFile {
    shards: Vec<Shard>,
    num_tokens: u64,
    seq_len: u64,
}

impl TokenFile {
    /// Opens a token file, or a directory of shards that `data prepare` wrote. Samples have `seq_len` tokens,
    /// all below `vocab_size`.
    pub fn open(
        path: impl AsRef<Path>,
        seq_len: usize,
        vocab_size: usize,
    ) -> Result<TokenFile, DataError> {
        let path = path.as_ref();
        let mut shards = Vec::new();
        let mut num_tokens = 0;
        for path in files(path, vocab_size)? {
            let shard = Shard::open(&path, num_tokens, vocab_size as u64)?;
            num_tokens += shard.num_tokens;
            shards.push(shard);
        }
        if seq_len == 0 || num_tokens <= seq_len as u64 {
            return Err(DataError::format(
                path,
                format!(
                    "{num_tokens} tokens are too few for one sequence of {seq_len} tokens and its last target"
                ),
            ));
        }
        Ok(TokenFile {
            shards,
            num_tokens,
            seq_len: seq_len as u64,
        })
    }

    /// The number of tokens in all shards.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Reads a range of tokens, which may span several shards.
    fn read(&self, first: u64, number: u64) -> Result<Vec<i64>, DataError> {
        let mut tokens = Vec::with_capacity(number as usize);
        let end = first + number;
        let from = self.shards.partition_point(|shard| shard.end() <= first);
        for shard in self.shards[from..]
            .iter()
            .take_while(|shard| shard.first < end)
        {
            let start = first.max(shard.first);
            let count = end.min(shard.end()) - start;
            tokens.extend(shard.read(start - shard.first, count)?);
        }
        Ok(tokens)
    }
}

/// The shard files of a dataset, in order. Tokens that the model does not have would end a job in the middle of
/// training, so a dataset that may have some is rejected.
fn files(path: &Path, vocab_size: usize) -> Result<Vec<PathBuf>, DataError> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let index = Index::read(path)?;
    if index.vocab_size > vocab_size {
        let reason = format!(
            "it was tokenized with a vocabulary of {} tokens, and the model has {vocab_size}: use the model's \
             tokenizer, or a model with as many tokens",
            index.vocab_size
        );
        return Err(DataError::format(&path.join(INDEX_FILE), reason));
    }
    Ok(index.paths(path))
}

/// One shard: a token file.
#[derive(Debug)]
struct Shard {
    file: File,
    path: PathBuf,
    width: Width,
    num_tokens: u64,
    /// Index of its first token in the dataset.
    first: u64,
    vocab_size: u64,
}

impl Shard {
    fn open(path: &Path, first: u64, vocab_size: u64) -> Result<Shard, DataError> {
        let io = |error| DataError::io(path, error);
        let invalid = |reason: String| DataError::format(path, reason);
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        if size < HEADER_BYTES {
            return Err(invalid(format!(
                "{size} bytes are too few for a token file"
            )));
        }
        let mut header = [0; HEADER_BYTES as usize];
        file.read_exact_at(&mut header, 0).map_err(io)?;
        let (width, num_tokens) = read_header(&header, size).map_err(invalid)?;
        Ok(Shard {
            file,
            path: path.to_owned(),
            width,
            num_tokens,
            first,
            vocab_size,
        })
    }

    fn end(&self) -> u64 {
        self.first + self.num_tokens
    }

    fn read(&self, first: u64, number: u64) -> Result<Vec<i64>, DataError> {
        let mut bytes = vec![0; (number * self.width.bytes()) as usize];
        self.file
            .read_exact_at(&mut bytes, HEADER_BYTES + first * self.width.bytes())
            .map_err(|error| DataError::io(&self.path, error))?;
        let tokens = self.width.decode(&bytes);
        match tokens
            .iter()
            .position(|&token| token as u64 >= self.vocab_size)
        {
            None => Ok(tokens),
            Some(position) => Err(DataError::format(
                &self.path,
                format!(
                    "token {} is {}, but the vocabulary size is {}: set model.vocab_size to that of the \
                     tokenizer",
                    first + position as u64,
                    tokens[position],
                    self.vocab_size
                ),
            )),
        }
    }
}

impl Source for TokenFile {
    /// Consecutive samples share one token: the last target of one is the first input of the next.
    fn len(&self) -> Option<u64> {
        Some((self.num_tokens - 1) / self.seq_len)
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        check_index(index, (self.num_tokens - 1) / self.seq_len)?;
        let sequence = self.read(index * self.seq_len, self.seq_len + 1)?;
        Ok(Sample::from_sequence(&sequence))
    }
}

/// Writes a token file; tokens below 65,536 take two bytes each, others four.
pub fn write_tokens(path: impl AsRef<Path>, tokens: &[u32]) -> Result<(), DataError> {
    let path = path.as_ref();
    let largest = tokens.iter().copied().max().unwrap_or(0);
    let width = Width::of(largest as usize + 1);
    let write = || {
        let mut out = BufWriter::new(File::create(path)?);
        out.write_all(&header(width, tokens.len() as u64))?;
        let mut bytes = Vec::with_capacity(4);
        for &token in tokens {
            bytes.clear();
            width.encode(token, &mut bytes);
            out.write_all(&bytes)?;
        }
        out.flush()
    };
    write().map_err(|error| DataError::io(path, error))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;
    use trainyard_tokenize::Shard as ShardEntry;

    use super::*;

    fn written(tokens: &[u32]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        write_tokens(file.path(), tokens).unwrap();
        file
    }

    proptest! {
        #[test]
        fn written_tokens_are_read_back(
            tokens in prop::collection::vec(0u32..200_000, 2..60),
            seq_len in 1usize..10,
        ) {
            let file = written(&tokens);
            prop_assume!(tokens.len() > seq_len);
            let source = TokenFile::open(file.path(), seq_len, 200_000).unwrap();
            let number = source.len().unwrap() as usize;
            prop_assert_eq!(number, (tokens.len() - 1) / seq_len);
            for index in 0..number {
                let sequence = &tokens[index * seq_len..=(index + 1) * seq_len];
                let sequence: Vec<_> = sequence.iter().map(|&token| i64::from(token)).collect();
                prop_assert_eq!(source.sample(index as u64).unwrap(), Sample::from_sequence(&sequence));
            }
            prop_assert!(source.sample(number as u64).is_err());
        }

        #[test]
        fn random_headers_never_panic(mut header: [u8; 24], magic: bool, size: u64) {
            if magic {
                header[..8].copy_from_slice(b"TYTOKENS");
            }
            let _ = read_header(&header, size);
        }
    }

    #[test]
    fn small_tokens_take_two_bytes() {
        assert_eq!(
            written(&[1, 65_535]).as_file().metadata().unwrap().len(),
            28
        );
        assert_eq!(
            written(&[1, 65_536]).as_file().metadata().unwrap().len(),
            32
        );
    }

    #[test]
    fn invalid_files_are_rejected() {
        let error = |bytes: &[u8]| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), bytes).unwrap();
            TokenFile::open(file.path(), 2, 100)
                .unwrap_err()
                .to_string()
        };
        let good = std::fs::read(written(&[1, 2, 3, 4]).path()).unwrap();
        let patched = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        assert!(error(&good[..10]).contains("too few"));
        assert!(error(&good[..30]).contains("truncated"));
        assert!(error(&patched(0, b'X')).contains("TYTOKENS"));
        assert!(error(&patched(8, 2)).contains("version 2"));
        assert!(error(&patched(12, 3)).contains("tokens of 3 bytes"));
        assert!(error(&patched(23, 255)).contains("declares"));
    }

    #[test]
    fn an_index_of_another_vocabulary_or_directory_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let tokens: Vec<u32> = (0..100).collect();
        write_tokens(dir.path().join("0.bin"), &tokens).unwrap();
        let open = |file: &str, vocab_size: usize| {
            let shard = ShardEntry {
                file: file.into(),
                num_tokens: 100,
                num_documents: 1,
                digest: String::new(),
            };
            let index = Index {
                vocab_size,
                shards: vec![shard],
            };
            let text = serde_json::to_string(&index).unwrap();
            fs::write(dir.path().join(INDEX_FILE), text).unwrap();
            TokenFile::open(dir.path(), 8, 128)
        };
        assert!(open("0.bin", 128).is_ok());
        let error = open("0.bin", 129).unwrap_err().to_string();
        assert!(error.contains("129") && error.contains("128"), "{error}");
        let above = format!("../{}/0.bin", dir.path().file_name().unwrap().display());
        for file in [above.as_str(), "/etc/passwd", "..", "sub/0.bin", ""] {
            let error = open(file, 128).unwrap_err().to_string();
            assert!(error.contains("is not the name of a file"), "{error}");
        }
    }

    #[test]
    fn tokens_beyond_the_vocabulary_and_short_files_are_rejected() {
        let file = written(&[1, 2, 300]);
        let source = TokenFile::open(file.path(), 2, 300).unwrap();
        let message = source.sample(0).unwrap_err().to_string();
        assert!(message.contains("token 2 is 300"), "{message}");
        let message = TokenFile::open(file.path(), 3, 301)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("3 tokens are too few for one sequence of 3"),
            "{message}"
        );
    }
}

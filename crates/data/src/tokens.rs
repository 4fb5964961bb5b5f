//! Token files: one long text, already turned into numbers, in one file or in a folder of them.
//!
//! `trainyard data prepare` writes them; `trainyard-text` says what they look like.
//!
//! Samples are read where they lie, with positional reads. Mapping the file into memory would save
//! a copy of a few kilobytes per sample, but it is unsafe (a file that shrinks kills the process),
//! and the system's page cache serves both alike.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use trainyard_text::{HEADER, INDEX, Index, Width, header, read_header};

use crate::DataError;
use crate::source::{Sample, Source, check_index};

/// A token file, or a folder of them as one text, cut into sequences of one length.
#[derive(Debug)]
pub struct TokenFile {
    parts: Vec<Part>,
    num_tokens: u64,
    seq_len: u64,
}

impl TokenFile {
    /// Opens a token file, or a folder that `data prepare` made, whose samples have `seq_len` tokens
    /// below `vocab_size`.
    pub fn open(
        path: impl AsRef<Path>,
        seq_len: usize,
        vocab_size: usize,
    ) -> Result<TokenFile, DataError> {
        let path = path.as_ref();
        let mut parts = Vec::new();
        let mut num_tokens = 0;
        for path in files(path)? {
            let part = Part::open(&path, num_tokens, vocab_size as u64)?;
            num_tokens += part.num_tokens;
            parts.push(part);
        }
        if seq_len == 0 || num_tokens <= seq_len as u64 {
            return Err(DataError::format(
                path,
                format!(
                    "{num_tokens} tokens hold no sequence of {seq_len} tokens and the one that follows"
                ),
            ));
        }
        Ok(TokenFile {
            parts,
            num_tokens,
            seq_len: seq_len as u64,
        })
    }

    /// How many tokens there are.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Tokens of the text, from whichever files have them.
    fn read(&self, first: u64, number: u64) -> Result<Vec<i64>, DataError> {
        let mut tokens = Vec::with_capacity(number as usize);
        let end = first + number;
        let from = self.parts.partition_point(|part| part.end() <= first);
        for part in self.parts[from..]
            .iter()
            .take_while(|part| part.first < end)
        {
            let start = first.max(part.first);
            let count = end.min(part.end()) - start;
            tokens.extend(part.read(start - part.first, count)?);
        }
        Ok(tokens)
    }
}

/// The files of a text, in order.
fn files(path: &Path) -> Result<Vec<PathBuf>, DataError> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let index = path.join(INDEX);
    let text = fs::read(&index).map_err(|error| DataError::io(&index, error))?;
    let index: Index = serde_json::from_slice(&text)
        .map_err(|error| DataError::format(&index, error.to_string()))?;
    let files = index.shards.into_iter();
    Ok(files.map(|shard| path.join(shard.file)).collect())
}

/// One file.
#[derive(Debug)]
struct Part {
    file: File,
    path: PathBuf,
    width: Width,
    num_tokens: u64,
    /// Which token of the text its first one is.
    first: u64,
    vocab_size: u64,
}

impl Part {
    fn open(path: &Path, first: u64, vocab_size: u64) -> Result<Part, DataError> {
        let io = |error| DataError::io(path, error);
        let refuse = |reason: String| DataError::format(path, reason);
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        if size < HEADER {
            return Err(refuse(format!("{size} bytes are too few for a token file")));
        }
        let mut header = [0; HEADER as usize];
        file.read_exact_at(&mut header, 0).map_err(io)?;
        let (width, num_tokens) = read_header(&header, size).map_err(refuse)?;
        Ok(Part {
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
            .read_exact_at(&mut bytes, HEADER + first * self.width.bytes())
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
                    "token {} is {}, but the vocabulary ends at {}: set model.vocab_size to the \
                     tokenizer's",
                    first + position as u64,
                    tokens[position],
                    self.vocab_size
                ),
            )),
        }
    }
}

impl Source for TokenFile {
    /// Neighbouring samples share one token: the last target of one is the first input of the next.
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
    use proptest::prelude::*;

    use super::*;

    fn written(tokens: &[u32]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        write_tokens(file.path(), tokens).unwrap();
        file
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            tokens in prop::collection::vec(0u32..200_000, 2..60),
            seq_len in 1usize..10,
        ) {
            let file = written(&tokens);
            prop_assume!(tokens.len() > seq_len);
            let source = TokenFile::open(file.path(), seq_len, 200_000).unwrap();
            let number = source.len().unwrap() as usize;
            prop_assert_eq!(number, (tokens.len() - 1) / seq_len);
            for index in 0..number {
                let part = &tokens[index * seq_len..=(index + 1) * seq_len];
                let part: Vec<_> = part.iter().map(|&token| i64::from(token)).collect();
                prop_assert_eq!(source.sample(index as u64).unwrap(), Sample::from_sequence(&part));
            }
            prop_assert!(source.sample(number as u64).is_err());
        }

        #[test]
        fn headers_at_random_never_panic(mut header: [u8; 24], magic: bool, size: u64) {
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
    fn broken_files_are_refused() {
        let refusal = |bytes: &[u8]| {
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
        assert!(refusal(&good[..10]).contains("too few"));
        assert!(refusal(&good[..30]).contains("cut off"));
        assert!(refusal(&patched(0, b'X')).contains("TYTOKENS"));
        assert!(refusal(&patched(8, 2)).contains("version 2"));
        assert!(refusal(&patched(12, 3)).contains("tokens of 3 bytes"));
        assert!(refusal(&patched(23, 255)).contains("promises"));
    }

    #[test]
    fn tokens_beyond_the_vocabulary_and_short_files_are_refused() {
        let file = written(&[1, 2, 300]);
        let source = TokenFile::open(file.path(), 2, 300).unwrap();
        let message = source.sample(0).unwrap_err().to_string();
        assert!(message.contains("token 2 is 300"), "{message}");
        let message = TokenFile::open(file.path(), 3, 301)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("3 tokens hold no sequence of 3"),
            "{message}"
        );
    }
}

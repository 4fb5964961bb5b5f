//! Token files: one long text, already turned into numbers.
//!
//! The file begins with 24 bytes: `TYTOKENS`, the version and the width of a token in bytes as
//! `u32`, the number of tokens as `u64`. Then come the tokens. All numbers are little-endian.
//!
//! Samples are read where they lie, with positional reads. Mapping the file into memory would save
//! a copy of a few kilobytes per sample, but it is unsafe (a file that shrinks kills the process),
//! and the system's page cache serves both alike.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::DataError;
use crate::source::{Sample, Source, check_index};

const MAGIC: &[u8; 8] = b"TYTOKENS";
const VERSION: u32 = 1;
const HEADER: u64 = 24;

/// A token file, cut into sequences of one length.
#[derive(Debug)]
pub struct TokenFile {
    file: File,
    path: PathBuf,
    width: Width,
    num_tokens: u64,
    seq_len: u64,
    vocab_size: u64,
}

impl TokenFile {
    /// Opens a token file whose samples have `seq_len` tokens below `vocab_size`.
    pub fn open(
        path: impl AsRef<Path>,
        seq_len: usize,
        vocab_size: usize,
    ) -> Result<TokenFile, DataError> {
        let path = path.as_ref();
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
        if seq_len == 0 || num_tokens <= seq_len as u64 {
            return Err(refuse(format!(
                "{num_tokens} tokens hold no sequence of {seq_len} tokens and the one that follows"
            )));
        }
        Ok(TokenFile {
            file,
            path: path.to_owned(),
            width,
            num_tokens,
            seq_len: seq_len as u64,
            vocab_size: vocab_size as u64,
        })
    }

    /// How many tokens the file has.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
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
    let width = match tokens.iter().all(|&token| token <= u32::from(u16::MAX)) {
        true => Width::Two,
        false => Width::Four,
    };
    let write = || {
        let mut out = BufWriter::new(File::create(path)?);
        out.write_all(MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&(width.bytes() as u32).to_le_bytes())?;
        out.write_all(&(tokens.len() as u64).to_le_bytes())?;
        for token in tokens {
            out.write_all(&token.to_le_bytes()[..width.bytes() as usize])?;
        }
        out.flush()
    };
    write().map_err(|error| DataError::io(path, error))
}

/// Bytes of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    Two,
    Four,
}

impl Width {
    fn bytes(self) -> u64 {
        match self {
            Width::Two => 2,
            Width::Four => 4,
        }
    }

    fn decode(self, bytes: &[u8]) -> Vec<i64> {
        // Little-endian: bytes that are not there are zeros at the top.
        let widen = |token: &[u8]| {
            let mut wide = [0; 8];
            wide[..token.len()].copy_from_slice(token);
            i64::from_le_bytes(wide)
        };
        bytes
            .chunks_exact(self.bytes() as usize)
            .map(widen)
            .collect()
    }
}

/// Width and number of tokens, if the header fits a file of `size` bytes.
fn read_header(header: &[u8; HEADER as usize], size: u64) -> Result<(Width, u64), String> {
    if !header.starts_with(MAGIC) {
        return Err("not a token file: it does not begin with TYTOKENS".into());
    }
    let version = u32::from_le_bytes(field(header, 8));
    if version != VERSION {
        return Err(format!(
            "version {version} of token files is not known: only {VERSION} is"
        ));
    }
    let width = match u32::from_le_bytes(field(header, 12)) {
        2 => Width::Two,
        4 => Width::Four,
        other => {
            return Err(format!(
                "tokens of {other} bytes are not known: 2 and 4 are"
            ));
        }
    };
    let number = u64::from_le_bytes(field(header, 16));
    let expected = number
        .checked_mul(width.bytes())
        .and_then(|bytes| bytes.checked_add(HEADER));
    match expected == Some(size) {
        true => Ok((width, number)),
        false => Err(format!(
            "the header promises {number} tokens of {} bytes, but the file has {size} bytes: was it \
             cut off?",
            width.bytes()
        )),
    }
}

fn field<const N: usize>(header: &[u8; HEADER as usize], at: usize) -> [u8; N] {
    std::array::from_fn(|byte| header[at + byte])
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
                header[..8].copy_from_slice(MAGIC);
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

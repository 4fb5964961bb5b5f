//! Content digests that detect corruption.
//!
//! A file has one digest per block, so that a reader of some blocks verifies only those.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The size of a digested block in bytes; the last block of a file may be shorter.
pub const BLOCK_BYTES: u64 = 4 << 20;

/// A BLAKE3 digest, serialized as 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(*blake3::hash(bytes).as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

impl FromStr for Digest {
    type Err = &'static str;

    /// Accepts lower case only: with a single spelling, no flipped bit yields the same digest.
    fn from_str(text: &str) -> Result<Digest, Self::Err> {
        const WRONG: &str = "a digest is 64 lower-case hexadecimal digits";
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(WRONG),
        };
        let text = text.as_bytes();
        let mut bytes = [0; 32];
        if text.len() != 2 * bytes.len() {
            return Err(WRONG);
        }
        for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
            *byte = 16 * digit(pair[0])? + digit(pair[1])?;
        }
        Ok(Digest(bytes))
    }
}

impl TryFrom<String> for Digest {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Digest, Self::Error> {
        text.parse()
    }
}

/// Computes the digests of a file's blocks while it is written.
#[derive(Default)]
pub(crate) struct BlockHasher {
    block: blake3::Hasher,
    num_bytes: u64,
    digests: Vec<Digest>,
}

impl BlockHasher {
    /// Hashes the next bytes of the file.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = BLOCK_BYTES - self.num_bytes % BLOCK_BYTES;
            let (now, later) = bytes.split_at(bytes.len().min(room as usize));
            self.block.update(now);
            self.num_bytes += now.len() as u64;
            if self.num_bytes.is_multiple_of(BLOCK_BYTES) {
                self.end_block();
            }
            bytes = later;
        }
    }

    /// Returns the length of the file and the digest of every block.
    pub(crate) fn finish(mut self) -> (u64, Vec<Digest>) {
        if !self.num_bytes.is_multiple_of(BLOCK_BYTES) {
            self.end_block();
        }
        (self.num_bytes, self.digests)
    }

    fn end_block(&mut self) {
        self.digests.push(Digest(*self.block.finalize().as_bytes()));
        self.block.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_has_a_single_spelling() {
        let digest = Digest::of(b"trainyard");
        let text = digest.to_string();
        assert_eq!(text.parse(), Ok(digest));
        assert!(text.to_uppercase().parse::<Digest>().is_err());
        assert!(text[1..].parse::<Digest>().is_err());
    }

    #[test]
    fn block_digests_do_not_depend_on_how_writes_are_split() {
        let bytes: Vec<u8> = (0..BLOCK_BYTES as usize * 2 + 777)
            .map(|i| (i * 31 % 251) as u8)
            .collect();
        let mut hasher = BlockHasher::default();
        bytes
            .chunks(1_000_003)
            .for_each(|written| hasher.update(written));
        let expected: Vec<Digest> = bytes.chunks(BLOCK_BYTES as usize).map(Digest::of).collect();
        assert_eq!(hasher.finish(), (bytes.len() as u64, expected));
    }
}

//! The format of token files. The header is `TYTOKENS`, the format version and the bytes per token as `u32`,
//! and the number of tokens as `u64`, all little-endian. The tokens follow.

const MAGIC: &[u8; 8] = b"TYTOKENS";
const VERSION: u32 = 1;
/// The size of the header in bytes.
pub const HEADER_BYTES: u64 = 24;

/// The number of bytes per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// Two bytes, for vocabularies of up to 65,536 tokens.
    Two,
    /// Four bytes, for larger vocabularies.
    Four,
}

impl Width {
    /// The smallest width for all tokens below `vocab_size`.
    pub const fn of(vocab_size: usize) -> Width {
        if vocab_size <= 1 << 16 {
            Width::Two
        } else {
            Width::Four
        }
    }

    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Width::Two => 2,
            Width::Four => 4,
        }
    }

    /// Appends the encoding of a token to `out`.
    pub fn encode(self, token: u32, out: &mut Vec<u8>) {
        out.extend_from_slice(&token.to_le_bytes()[..self.bytes() as usize]);
    }

    /// Decodes consecutive tokens.
    pub fn decode(self, bytes: &[u8]) -> Vec<i64> {
        // Little-endian: the missing high bytes are zero.
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

/// The header of a file with `num_tokens` tokens.
pub fn header(width: Width, num_tokens: u64) -> [u8; HEADER_BYTES as usize] {
    let mut header = [0; HEADER_BYTES as usize];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&(width.bytes() as u32).to_le_bytes());
    header[16..].copy_from_slice(&num_tokens.to_le_bytes());
    header
}

/// Parses a header and checks it against the file's length `size`. Returns the width and number of tokens.
pub fn read_header(
    header: &[u8; HEADER_BYTES as usize],
    size: u64,
) -> Result<(Width, u64), String> {
    if !header.starts_with(MAGIC) {
        return Err("not a token file: it does not start with TYTOKENS".into());
    }
    let version = u32::from_le_bytes(field(header, 8));
    if version != VERSION {
        return Err(format!(
            "token file version {version} is not supported: this build reads version {VERSION} only"
        ));
    }
    let width = match u32::from_le_bytes(field(header, 12)) {
        2 => Width::Two,
        4 => Width::Four,
        other => {
            return Err(format!(
                "tokens of {other} bytes are not supported: a token has 2 or 4 bytes"
            ));
        }
    };
    let number = u64::from_le_bytes(field(header, 16));
    let expected = number
        .checked_mul(width.bytes())
        .and_then(|bytes| bytes.checked_add(HEADER_BYTES));
    if expected == Some(size) {
        Ok((width, number))
    } else {
        Err(format!(
            "the header declares {number} tokens of {} bytes, but the file has {size} bytes: was it \
             truncated?",
            width.bytes()
        ))
    }
}

fn field<const N: usize>(header: &[u8; HEADER_BYTES as usize], at: usize) -> [u8; N] {
    std::array::from_fn(|byte| header[at + byte])
}

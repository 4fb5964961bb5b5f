//! What a token file begins with: `TYTOKENS`, the version and the width of a token in bytes as `u32`, the
//! number of tokens as `u64`; all little-endian. The tokens follow.

const MAGIC: &[u8; 8] = b"TYTOKENS";
const VERSION: u32 = 1;
/// Bytes before the first token.
pub const HEADER: u64 = 24;

/// Bytes of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// For vocabularies of up to 65,536 tokens.
    Two,
    /// For others.
    Four,
}

impl Width {
    /// The width that holds every token below `vocab_size`.
    pub const fn of(vocab_size: usize) -> Width {
        if vocab_size <= 1 << 16 {
            Width::Two
        } else {
            Width::Four
        }
    }

    /// How many bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Width::Two => 2,
            Width::Four => 4,
        }
    }

    /// A token as it is written.
    pub fn encode(self, token: u32, out: &mut Vec<u8>) {
        out.extend_from_slice(&token.to_le_bytes()[..self.bytes() as usize]);
    }

    /// Tokens as they were written.
    pub fn decode(self, bytes: &[u8]) -> Vec<i64> {
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

/// The header of a file of so many tokens.
pub fn header(width: Width, num_tokens: u64) -> [u8; HEADER as usize] {
    let mut header = [0; HEADER as usize];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&(width.bytes() as u32).to_le_bytes());
    header[16..].copy_from_slice(&num_tokens.to_le_bytes());
    header
}

/// Width and number of tokens, if the header fits a file of `size` bytes.
pub fn read_header(header: &[u8; HEADER as usize], size: u64) -> Result<(Width, u64), String> {
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

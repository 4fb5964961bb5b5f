//! Bytes of numbers as they are sent.

use crate::{Volume, replicated_volume};

/// How numbers are encoded when ranks send them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// In a type of this many bytes.
    Plain(u64),
    /// In 8 bits each, with a float32 scale for every block of [`Encoding::BLOCK`].
    Blocks8,
    /// Only this many of every chunk of [`Encoding::CHUNK`], each as a bfloat16 value and a place of 16 bits.
    TopK(u64),
    /// Only this many of every chunk of [`Encoding::CHUNK`], each as a place and two bits, with a float32 scale per chunk.
    TwoBitTopK(u64),
}

impl Encoding {
    /// Numbers that share a scale.
    pub const BLOCK: usize = 256;
    /// Numbers among which the largest are chosen. A place needs 12 bits, which are sent as 16.
    pub const CHUNK: usize = 4096;

    /// How many numbers of a chunk are kept, if this share of them is: at least one.
    pub fn num_kept(share: f64) -> usize {
        let kept = (share * Encoding::CHUNK as f64).round() as usize;
        kept.clamp(1, Encoding::CHUNK)
    }

    /// Bytes of `length` numbers.
    pub fn bytes(self, length: u64) -> u64 {
        let num_chunks = length.div_ceil(Encoding::CHUNK as u64);
        match self {
            Encoding::Plain(width) => length * width,
            Encoding::Blocks8 => length + 4 * length.div_ceil(Encoding::BLOCK as u64),
            Encoding::TopK(k) => 4 * k * num_chunks,
            Encoding::TwoBitTopK(k) => (2 * k + 4) * num_chunks,
        }
    }

    /// The volume of an all-reduce of `length` gradients over `num_ranks`. Encoded gradients are reduced in two hops: every
    /// rank sends each other one its row, and then its sum of rows.
    pub fn all_reduce_volume(self, length: u64, num_ranks: usize) -> Volume {
        if let Encoding::Plain(width) = self {
            return replicated_volume(length * width, num_ranks);
        }
        let num_ranks = num_ranks as u64;
        let row = self.bytes(length.div_ceil(num_ranks));
        Volume {
            reduced: 2 * num_ranks * row,
            gradients: 2 * num_ranks * (num_ranks - 1) * row,
            ..Volume::default()
        }
    }

    /// The volume of an all-gather of `length` encoded gradients of each of `num_ranks`.
    pub fn gather_volume(self, length: u64, num_ranks: usize) -> Volume {
        let (num_ranks, row) = (num_ranks as u64, self.bytes(length));
        Volume {
            reduced: num_ranks * row,
            gradients: num_ranks * (num_ranks - 1) * row,
            ..Volume::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_8_bits_are_almost_four_times_smaller() {
        let plain = Encoding::Plain(4).bytes(1 << 20) as f64;
        let ratio = plain / Encoding::Blocks8.bytes(1 << 20) as f64;
        assert!((3.93..3.94).contains(&ratio), "{ratio}");
        assert_eq!(Encoding::Blocks8.bytes(257), 257 + 8);
        assert_eq!(Encoding::TopK(41).bytes(4097), 2 * 41 * 4);
    }
}

//! Synthetic datasets: endless, reproducible on every host, and cheap.
//!
//! The random generator of each sample is seeded from its index and the seed, so that any sample can be
//! generated independently. Three of four tokens follow a rule that a model can learn; images are noise.
//! All arithmetic wraps modulo 2^64.

use crate::source::{IMAGE_SIDE, Sample, Source};
use crate::{DataError, order::mix};

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
const NUM_CLASSES: u64 = 10;

/// Knuth's MMIX linear congruential generator, seeded per sample.
struct Generator(u64);

impl Generator {
    fn of(index: u64, seed: u64) -> Generator {
        let position = index.wrapping_add(1).wrapping_mul(GOLDEN);
        Generator(mix(position.wrapping_add(seed)))
    }

    fn next(&mut self) -> u64 {
        let scaled = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = scaled.wrapping_add(1_442_695_040_888_963_407);
        self.0
    }
}

/// Token sequences in which three of four tokens follow from the previous one; the others are random.
#[derive(Clone, Debug)]
pub struct SyntheticTokens {
    seq_len: usize,
    vocab_size: u64,
    seed: u64,
}

impl SyntheticTokens {
    /// Sequences of `seq_len` tokens below `vocab_size`.
    pub fn new(seq_len: usize, vocab_size: usize, seed: u64) -> Result<Self, DataError> {
        if seq_len == 0 || vocab_size == 0 {
            return Err(DataError::Setting(format!(
                "synthetic tokens need a vocabulary size and a sequence length of at least 1, not \
                 {vocab_size} and {seq_len}"
            )));
        }
        Ok(SyntheticTokens {
            seq_len,
            vocab_size: vocab_size as u64,
            seed,
        })
    }

    fn sequence(&self, index: u64) -> Vec<i64> {
        let mut generator = Generator::of(index, self.seed);
        let mut last = None;
        let mut next = || {
            let random = generator.next() >> 33;
            let token = match last {
                Some(token) if !random.is_multiple_of(4) => {
                    5u64.wrapping_mul(token).wrapping_add(7)
                }
                _ => random >> 2,
            } % self.vocab_size;
            last = Some(token);
            token as i64
        };
        (0..=self.seq_len).map(|_| next()).collect()
    }
}

impl Source for SyntheticTokens {
    fn len(&self) -> Option<u64> {
        None
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        Ok(Sample::from_sequence(&self.sequence(index)))
    }
}

/// Noise images with random labels, for benchmarks and tests.
#[derive(Clone, Debug)]
pub struct SyntheticImages {
    seed: u64,
}

impl SyntheticImages {
    /// Images that are generated from `seed` and their index.
    pub fn new(seed: u64) -> Self {
        SyntheticImages { seed }
    }
}

impl Source for SyntheticImages {
    fn len(&self) -> Option<u64> {
        None
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let mut generator = Generator::of(index, self.seed);
        // 24 random bits are represented exactly by a float32 below 1.
        let mut pixel = || (generator.next() >> 40) as f32 / (1u32 << 24) as f32;
        let pixels = (0..IMAGE_SIDE * IMAGE_SIDE).map(|_| pixel()).collect();
        let label = ((generator.next() >> 33) % NUM_CLASSES) as i64;
        Ok(Sample::image(pixels, label))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Array, Values};

    fn checksum(values: impl IntoIterator<Item = u64>) -> u64 {
        values
            .into_iter()
            .fold(0xCBF2_9CE4_8422_2325, |hash, value| {
                (hash ^ value).wrapping_mul(0x0100_0000_01B3)
            })
    }

    #[test]
    fn tokens_equal_those_of_the_pytorch_benchmarks() {
        let source = SyntheticTokens::new(8, 1024, 1).unwrap();
        let expected = [828, 248, 223, 98, 497, 444, 179, 902, 421];
        assert_eq!(source.sequence(0), expected);
        let Sample { inputs, targets } = source.sample(0).unwrap();
        assert_eq!(inputs, Array::ints(expected[..8].to_vec()));
        assert_eq!(targets, Array::ints(expected[1..].to_vec()));

        let source = SyntheticTokens::new(256, 4096, 7).unwrap();
        let tokens = (0..24).flat_map(|index| source.sequence(index));
        assert_eq!(checksum(tokens.map(|t| t as u64)), 0x26e1_ed2d_fda3_f122);
    }

    #[test]
    fn images_equal_those_of_the_pytorch_benchmarks() {
        let source = SyntheticImages::new(7);
        let bits = |array: Array| -> Vec<u64> {
            match array.values {
                Values::Int(values) => values.into_iter().map(|value| value as u64).collect(),
                Values::Float(values) => values.into_iter().map(|v| v.to_bits().into()).collect(),
            }
        };
        let values = (0..4).flat_map(|index| {
            let Sample { inputs, targets } = source.sample(index).unwrap();
            bits(inputs).into_iter().chain(bits(targets))
        });
        assert_eq!(checksum(values), 0x117d_1d39_105d_d913);
    }

    #[test]
    fn the_largest_index_is_valid() {
        let source = SyntheticTokens::new(3, 10, u64::MAX).unwrap();
        assert_eq!(source.sequence(u64::MAX).len(), 4);
    }

    #[test]
    fn an_empty_vocabulary_is_rejected() {
        assert!(SyntheticTokens::new(8, 0, 1).is_err());
        assert!(SyntheticTokens::new(0, 8, 1).is_err());
    }
}

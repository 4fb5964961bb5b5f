//! Initial weights from a counter-based generator, which has no state.
//!
//! Element `i` of a parameter depends only on the seed, the parameter's global name and `i`. So a rank can create
//! exactly its shard of a tensor, every layout starts from the same model, and another program can reproduce the
//! values bit for bit:
//!
//! ```text
//! key = fnv1a64(name) ^ (seed * GOLDEN)
//! z   = splitmix64_mix(key + (i + 1) * GOLDEN)
//! w   = f32(((z >> 40) * 2^-23 - 1) * bound)      in f64, rounded once
//! ```

use std::ops::Range;

pub(crate) const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The initialization of a parameter.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Init {
    /// Uniform between `-bound` and `bound`.
    Uniform {
        /// The maximum magnitude.
        bound: f64,
    },
    /// All ones, for norms.
    Ones,
    /// All zeros.
    Zeros,
}

impl Init {
    /// Uniform with the given standard deviation.
    pub fn with_std(std: f64) -> Init {
        Init::Uniform {
            bound: std * 3f64.sqrt(),
        }
    }

    /// Uniform within `1 / sqrt(num_inputs)`.
    pub fn fan_in(num_inputs: usize) -> Init {
        Init::Uniform {
            bound: 1.0 / (num_inputs as f64).sqrt(),
        }
    }

    /// The elements of the parameter `name` at the row-major indices `range`.
    pub fn values(self, name: &str, range: Range<u64>, seed: u64) -> Vec<f32> {
        let length = range.end.saturating_sub(range.start) as usize;
        match self {
            Init::Uniform { bound } => uniform(name, range, bound, seed),
            Init::Ones => vec![1.0; length],
            Init::Zeros => vec![0.0; length],
        }
    }
}

/// The elements at the row-major indices `range` of the parameter `name`, within `bound`.
pub fn uniform(name: &str, range: Range<u64>, bound: f64, seed: u64) -> Vec<f32> {
    let key = fnv1a64(name) ^ seed.wrapping_mul(GOLDEN);
    let scale = 2f64.powi(-23);
    range
        .map(|index| {
            let counter = index.wrapping_add(1).wrapping_mul(GOLDEN);
            let bits = splitmix64_mix(key.wrapping_add(counter)) >> 40;
            ((bits as f64 * scale - 1.0) * bound) as f32
        })
        .collect()
}

pub(crate) fn fnv1a64(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

/// The rounds of [`splitmix64_mix`]: a shift and a factor each.
pub(crate) const MIX: [(u32, u64); 2] = [(30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)];
/// The shift after the last round.
pub(crate) const LAST_SHIFT: u32 = 31;

/// A pseudo-random number for every `x` (splitmix64).
pub fn splitmix64(x: u64) -> u64 {
    splitmix64_mix(x.wrapping_add(GOLDEN))
}

pub(crate) fn splitmix64_mix(z: u64) -> u64 {
    let round = |z: u64, (shift, factor): (u32, u64)| (z ^ (z >> shift)).wrapping_mul(factor);
    let z = MIX.into_iter().fold(z, round);
    z ^ (z >> LAST_SHIFT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// FNV-1a over the bits of values, as in the test vectors of the PyTorch baselines.
    fn checksum(values: &[f32]) -> u64 {
        values.iter().fold(0xCBF2_9CE4_8422_2325, |hash, value| {
            (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01B3)
        })
    }

    #[test]
    fn equals_the_test_vectors_of_the_pytorch_baselines() {
        let vectors = [
            (
                "model.embed_tokens.weight",
                [0xbcf0_59a2, 0x3cb2_583a],
                0x6526_a508_0a5b_666b,
            ),
            (
                "model.layers.7.mlp.down_proj.weight",
                [0xbc36_ed49, 0x3b45_4874],
                0x2791_bd72_f480_d2cc,
            ),
        ];
        for (name, first, sum) in vectors {
            let values = Init::with_std(0.02).values(name, 0..512 * 1408, 7);
            assert_eq!([values[0].to_bits(), values[1].to_bits()], first, "{name}");
            assert_eq!(checksum(&values), sum, "{name}");
        }
    }

    #[test]
    fn fan_in_is_the_inverse_square_root() {
        assert_eq!(Init::fan_in(16), Init::Uniform { bound: 0.25 });
    }

    proptest! {
        #[test]
        fn a_range_of_values_equals_that_range_of_all_values(
            name in "[a-z.0-9]{1,40}", cuts in prop::array::uniform2(0u64..=300), seed: u64,
        ) {
            let (start, end) = (cuts[0].min(cuts[1]), cuts[0].max(cuts[1]));
            for init in [Init::with_std(0.02), Init::Ones, Init::Zeros] {
                let all = init.values(&name, 0..300, seed);
                prop_assert_eq!(
                    init.values(&name, start..end, seed),
                    &all[start as usize..end as usize]
                );
            }
        }

        #[test]
        fn values_stay_within_the_bound(name in "[a-z]{1,8}", bound in 1e-6..10f64, seed: u64) {
            prop_assert!(uniform(&name, 0..200, bound, seed).iter().all(|w| w.abs() <= bound as f32));
        }
    }
}

//! The order of the samples of a finite source, epoch by epoch.
//!
//! A shuffle is a permutation that is computed, not stored: a Feistel network permutes numbers of a fixed
//! bit width, and a result beyond the end of the source is permuted again until it is within (cycle
//! walking). So any position of a source of any size can be computed directly.

/// The order in which samples are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The order of the source, repeated every epoch.
    Sequential,
    /// A different permutation in each epoch.
    Shuffled {
        /// Determines all permutations.
        seed: u64,
    },
}

impl Order {
    /// The index of the sample at `position` of the training stream, in a source of `len` samples. An endless
    /// source (`None`) has no epochs and is read sequentially; an empty source returns `None`.
    pub fn locate(self, position: u64, len: Option<u64>) -> Option<u64> {
        let Some(len) = len else {
            return Some(position);
        };
        let epoch = position.checked_div(len)?;
        let within = position % len;
        Some(match self {
            Order::Sequential => within,
            Order::Shuffled { seed } => permute(within, len, mix(mix(seed) ^ epoch)),
        })
    }
}

/// A bijection of `0..len`, one for each key. Expects `value < len`.
fn permute(value: u64, len: u64, key: u64) -> u64 {
    let bits = u64::BITS - (len - 1).leading_zeros();
    let half = bits.div_ceil(2).max(1);
    let mut value = feistel(value, half, key);
    // At most three quarters of the values are out of range, so few rounds are necessary.
    while value >= len {
        value = feistel(value, half, key);
    }
    value
}

/// A Feistel network of six rounds over two halves of `half` bits each, which is always invertible.
fn feistel(value: u64, half: u32, key: u64) -> u64 {
    let mask = (1u64 << half) - 1;
    let (left, right) = (0..6).fold((value >> half, value & mask), |(left, right), round| {
        let scrambled = mix(mix(key.wrapping_add(round)) ^ right);
        (right, left ^ (scrambled & mask))
    });
    left << half | right
}

/// The finalizer of splitmix64: every bit of the result depends on every bit of the input.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn epoch(order: Order, number: u64, len: u64) -> Vec<u64> {
        (number * len..(number + 1) * len)
            .map(|position| order.locate(position, Some(len)).unwrap())
            .collect()
    }

    proptest! {
        #[test]
        fn every_epoch_has_every_sample_once(len in 1u64..2000, number in 0u64..100, seed: u64) {
            let seen: BTreeSet<_> = epoch(Order::Shuffled { seed }, number, len).into_iter().collect();
            prop_assert_eq!(seen, (0..len).collect());
        }

        #[test]
        fn huge_sources_stay_in_range(value: u64, len in 1u64.., key: u64) {
            prop_assert!(permute(value % len, len, key) < len);
        }

        #[test]
        fn sequential_order_repeats(len in 1u64..50, number in 0u64..50) {
            prop_assert_eq!(epoch(Order::Sequential, number, len), (0..len).collect::<Vec<_>>());
        }
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let order = |seed, number| epoch(Order::Shuffled { seed }, number, 1000);
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_eq!(order(1, 3), order(1, 3));
    }

    #[test]
    fn a_shuffle_leaves_few_samples_where_they_were() {
        let order = epoch(Order::Shuffled { seed: 5 }, 0, 10_000);
        let fixed = order.iter().zip(0..).filter(|(a, b)| *a == b).count();
        assert!(fixed < 20, "{fixed}");
        let neighbors = order.windows(2).filter(|w| w[0] + 1 == w[1]).count();
        assert!(neighbors < 20, "{neighbors}");
    }

    #[test]
    fn an_empty_source_has_no_samples_and_an_endless_source_is_sequential() {
        assert_eq!(Order::Sequential.locate(0, Some(0)), None);
        assert_eq!(
            Order::Shuffled { seed: 1 }.locate(u64::MAX, None),
            Some(u64::MAX)
        );
    }
}

//! In which order the samples of a finite source come, epoch after epoch.
//!
//! A shuffle is a permutation computed from a counter: a Feistel network turns any number of bits
//! into a permutation of as many, and a result that falls outside the source is sent through again
//! until it falls inside. Nothing is stored, so a source of any size can be entered anywhere.

/// The order of a source's samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As the source has them, again and again.
    Sequential,
    /// A different order in each epoch, all of them from the seed.
    Shuffled {
        /// Equal seeds give equal orders.
        seed: u64,
    },
}

impl Order {
    /// The sample that is `position`th since training began, in a source of `len` samples. An
    /// endless source (`None`) has no epochs and comes as it is; an empty one has no sample.
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
    // At most three quarters of the values lie outside, so this ends soon.
    while value >= len {
        value = feistel(value, half, key);
    }
    value
}

/// Six rounds over two halves of `half` bits each: invertible whatever the round function does.
fn feistel(value: u64, half: u32, key: u64) -> u64 {
    let mask = (1u64 << half) - 1;
    let (left, right) = (0..6).fold((value >> half, value & mask), |(left, right), round| {
        let scrambled = mix(mix(key.wrapping_add(round)) ^ right);
        (right, left ^ (scrambled & mask))
    });
    left << half | right
}

/// The finaliser of splitmix64: every bit of the result depends on every bit of the input.
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
        let neighbours = order.windows(2).filter(|w| w[0] + 1 == w[1]).count();
        assert!(neighbours < 20, "{neighbours}");
    }

    #[test]
    fn an_empty_source_has_no_sample_and_an_endless_one_any() {
        assert_eq!(Order::Sequential.locate(0, Some(0)), None);
        assert_eq!(
            Order::Shuffled { seed: 1 }.locate(u64::MAX, None),
            Some(u64::MAX)
        );
    }
}

//! Assignment of gradients to buckets.
//!
//! Small collectives are slow and one big collective cannot overlap with backward, so gradients are packed into
//! buckets in the order in which backward completes them. The first bucket is small, so that communication starts
//! early.

use tch::Kind;

/// Bucket sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketLimits {
    /// Size of the first bucket.
    pub first: u64,
    /// Size of all other buckets.
    pub rest: u64,
}

impl Default for BucketLimits {
    fn default() -> Self {
        BucketLimits {
            first: 1 << 20,
            rest: 25 << 20,
        }
    }
}

impl BucketLimits {
    /// The limits for a model with `total` bytes of gradients: no bucket is larger than a sixteenth of them, so
    /// that little is left to reduce after backward. The limit is never smaller than the first bucket's.
    pub fn for_total(self, total: u64) -> BucketLimits {
        const MOST_BUCKETS: u64 = 16;
        BucketLimits {
            rest: self.rest.min((total / MOST_BUCKETS).max(self.first)),
            ..self
        }
    }
}

/// Packs gradients, given in the order in which they become ready, into buckets of one type each.
///
/// A bucket is closed by the gradient that brings it to its limit, so every bucket but the last of its type is at
/// least as large as the limit. Returns indices into `gradients`.
pub fn assign_buckets(gradients: &[(Kind, u64)], limits: BucketLimits) -> Vec<Vec<usize>> {
    let mut closed: Vec<Vec<usize>> = Vec::new();
    let mut open: Vec<(Kind, u64, Vec<usize>)> = Vec::new();
    for (position, &(kind, bytes)) in gradients.iter().enumerate() {
        let at = open
            .iter()
            .position(|(k, ..)| *k == kind)
            .unwrap_or_else(|| {
                open.push((kind, 0, Vec::new()));
                open.len() - 1
            });
        let (_, size, members) = &mut open[at];
        *size += bytes;
        members.push(position);
        let limit = if closed.is_empty() {
            limits.first
        } else {
            limits.rest
        };
        if *size >= limit {
            closed.push(open.remove(at).2);
        }
    }
    // Open buckets are ordered by their last member, which decides when they can be reduced.
    open.sort_by_key(|(_, _, members)| members.last().copied());
    closed.extend(open.into_iter().map(|(_, _, members)| members));
    closed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kind() -> impl Strategy<Value = Kind> {
        prop_oneof![Just(Kind::Float), Just(Kind::BFloat16)]
    }

    proptest! {
        #[test]
        fn buckets_partition_the_gradients(
            gradients in prop::collection::vec((kind(), 1u64..1000), 0..200),
            first in 1u64..500,
            rest in 1u64..2000,
        ) {
            let buckets = assign_buckets(&gradients, BucketLimits { first, rest });
            let mut seen: Vec<usize> = buckets.iter().flatten().copied().collect();
            for bucket in &buckets {
                prop_assert!(!bucket.is_empty());
                prop_assert!(bucket.is_sorted());
                prop_assert!(bucket.iter().all(|&i| gradients[i].0 == gradients[bucket[0]].0));
                // No bucket reaches its limit without its last member.
                let before: u64 = bucket[..bucket.len() - 1].iter().map(|&i| gradients[i].1).sum();
                prop_assert!(before < first.max(rest));
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..gradients.len()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn bucket_sizes_grow_with_the_model_up_to_the_limit() {
        let limits = BucketLimits::default();
        assert_eq!(limits.for_total(4 << 20).rest, 1 << 20);
        assert_eq!(limits.for_total(160 << 20).rest, 10 << 20);
        assert_eq!(limits.for_total(1 << 40).rest, 25 << 20);
    }

    #[test]
    fn the_first_bucket_is_small() {
        let gradients = vec![(Kind::Float, 10); 10];
        let buckets = assign_buckets(
            &gradients,
            BucketLimits {
                first: 10,
                rest: 50,
            },
        );
        let sizes: Vec<usize> = buckets.iter().map(Vec::len).collect();
        assert_eq!(sizes, [1, 5, 4]);
    }
}

//! The assignment of positions to context-parallel ranks (zigzag, for load balance), and the attention blocks of a
//! ring.

use std::ops::Range;

use super::ContextParallelMethod;

/// The number of chunks of a sequence per rank.
pub(super) fn chunks_per_rank(method: ContextParallelMethod) -> usize {
    match method {
        ContextParallelMethod::Ring => 2,
        ContextParallelMethod::Ulysses => 1,
    }
}

/// The positions of rank `index` of `size`; `None` if the length is not divisible.
pub(super) fn positions(
    method: ContextParallelMethod,
    length: usize,
    size: usize,
    index: usize,
) -> Option<Vec<Range<usize>>> {
    let num_chunks = size * chunks_per_rank(method);
    if !length.is_multiple_of(num_chunks) {
        return None;
    }
    let chunk = length / num_chunks;
    let at = |number: usize| number * chunk..(number + 1) * chunk;
    Some(match method {
        ContextParallelMethod::Ring => vec![at(index), at(num_chunks - 1 - index)],
        ContextParallelMethod::Ulysses => vec![at(index)],
    })
}

/// The part of an attention block of a ring that a causal mask leaves to compute.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum MaskKind {
    /// The rank's own keys, with a causal mask.
    Causal,
    /// Keys of a lower rank: all queries attend to the first half of them.
    FirstHalfOfKeys,
    /// Keys of a higher rank: the second half of the queries attends to all of them.
    SecondHalfOfQueries,
}

/// The mask of the queries of rank `index` and the keys of rank `source`.
pub(super) fn mask_kind(index: usize, source: usize) -> MaskKind {
    match source.cmp(&index) {
        std::cmp::Ordering::Equal => MaskKind::Causal,
        std::cmp::Ordering::Less => MaskKind::FirstHalfOfKeys,
        std::cmp::Ordering::Greater => MaskKind::SecondHalfOfQueries,
    }
}

impl MaskKind {
    /// The start and number of the queries, and of the keys, to compute with, of `length` each.
    pub(super) fn ranges(self, length: i64) -> ((i64, i64), (i64, i64)) {
        let half = length / 2;
        match self {
            MaskKind::Causal => ((0, length), (0, length)),
            MaskKind::FirstHalfOfKeys => ((0, length), (0, half)),
            MaskKind::SecondHalfOfQueries => ((half, length - half), (0, length)),
        }
    }

    /// Whether the block needs a causal mask; in other blocks all queries come after all keys.
    pub(super) fn is_causal(self) -> bool {
        self == MaskKind::Causal
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn flat(method: ContextParallelMethod, length: usize, size: usize, index: usize) -> Vec<usize> {
        let positions = positions(method, length, size, index).unwrap();
        positions.into_iter().flatten().collect()
    }

    proptest! {
        #[test]
        fn every_position_belongs_to_one_rank(size in 1usize..9, chunk in 1usize..5) {
            for method in [ContextParallelMethod::Ring, ContextParallelMethod::Ulysses] {
                let length = 2 * size * chunk;
                let mut all: Vec<usize> =
                    (0..size).flat_map(|index| flat(method, length, size, index)).collect();
                all.sort_unstable();
                prop_assert_eq!(all, (0..length).collect::<Vec<_>>());
            }
        }

        /// The computed pairs are exactly those that a causal mask allows, and all ranks compute equally many in
        /// every hop but the first.
        #[test]
        fn a_ring_computes_the_causal_mask_with_balanced_load(size in 1usize..7, chunk in 1usize..4) {
            let length = 2 * size * chunk;
            let own = 2 * chunk as i64;
            for index in 0..size {
                let queries = flat(ContextParallelMethod::Ring, length, size, index);
                let mut computed = Vec::new();
                for source in 0..size {
                    let keys = flat(ContextParallelMethod::Ring, length, size, source);
                    let mask = mask_kind(index, source);
                    let ((q, nq), (k, nk)) = mask.ranges(own);
                    if source != index {
                        prop_assert_eq!(nq * nk, own * own / 2);
                    }
                    for &query in &queries[q as usize..(q + nq) as usize] {
                        let keys = &keys[k as usize..(k + nk) as usize];
                        let visible = keys.iter().filter(|&&key| !mask.is_causal() || key <= query);
                        computed.extend(visible.map(|&key| (query, key)));
                    }
                }
                computed.sort_unstable();
                let mut expected: Vec<_> =
                    queries.iter().flat_map(|&q| (0..=q).map(move |k| (q, k))).collect();
                expected.sort_unstable();
                prop_assert_eq!(computed, expected);
            }
        }
    }

    #[test]
    fn an_indivisible_length_is_rejected() {
        assert_eq!(positions(ContextParallelMethod::Ring, 6, 2, 0), None);
        assert_eq!(
            positions(ContextParallelMethod::Ring, 8, 2, 0),
            Some(vec![0..2, 6..8])
        );
        assert_eq!(
            positions(ContextParallelMethod::Ulysses, 6, 2, 1),
            Some(std::iter::once(3..6).collect())
        );
    }
}

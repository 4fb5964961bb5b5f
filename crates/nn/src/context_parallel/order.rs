//! Which positions of a sequence a rank has, and what of a ring's blocks it has to compute.

use std::ops::Range;

use super::Method;

/// Chunks of a sequence that one rank has.
pub(super) fn chunks_per_rank(method: Method) -> usize {
    match method {
        Method::Ring => 2,
        Method::Ulysses => 1,
    }
}

/// The positions of rank `index` of `size`; none where the length cannot be divided evenly.
pub(super) fn positions(
    method: Method,
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
        Method::Ring => vec![at(index), at(num_chunks - 1 - index)],
        Method::Ulysses => vec![at(index)],
    })
}

/// Which queries of a rank see which keys of another in a ring.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Sight {
    /// The rank's own keys: all queries see those before them.
    Own,
    /// Of a rank nearer to both ends: all queries see its first chunk.
    Outer,
    /// Of a rank nearer to the middle: the second chunk of queries sees all keys.
    Inner,
}

/// What rank `index` sees of the keys of rank `source`.
pub(super) fn sight(index: usize, source: usize) -> Sight {
    match source.cmp(&index) {
        std::cmp::Ordering::Equal => Sight::Own,
        std::cmp::Ordering::Less => Sight::Outer,
        std::cmp::Ordering::Greater => Sight::Inner,
    }
}

impl Sight {
    /// Where the queries and the keys that meet begin and how many there are, of `length` each.
    pub(super) fn ranges(self, length: i64) -> ((i64, i64), (i64, i64)) {
        let half = length / 2;
        match self {
            Sight::Own => ((0, length), (0, length)),
            Sight::Outer => ((0, length), (0, half)),
            Sight::Inner => ((half, length - half), (0, length)),
        }
    }

    /// Whether positions among those that meet matter: elsewhere all queries come after all keys.
    pub(super) fn is_causal(self) -> bool {
        self == Sight::Own
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn flat(method: Method, length: usize, size: usize, index: usize) -> Vec<usize> {
        let positions = positions(method, length, size, index).unwrap();
        positions.into_iter().flatten().collect()
    }

    proptest! {
        #[test]
        fn every_position_is_some_ranks(size in 1usize..9, chunk in 1usize..5) {
            for method in [Method::Ring, Method::Ulysses] {
                let length = 2 * size * chunk;
                let mut all: Vec<usize> =
                    (0..size).flat_map(|index| flat(method, length, size, index)).collect();
                all.sort_unstable();
                prop_assert_eq!(all, (0..length).collect::<Vec<_>>());
            }
        }

        /// The pairs that meet are exactly those a causal mask allows, and every rank has as many in
        /// every hop but the first.
        #[test]
        fn a_ring_computes_the_causal_mask_and_shares_it_evenly(size in 1usize..7, chunk in 1usize..4) {
            let length = 2 * size * chunk;
            let own = 2 * chunk as i64;
            for index in 0..size {
                let queries = flat(Method::Ring, length, size, index);
                let mut seen = Vec::new();
                for source in 0..size {
                    let keys = flat(Method::Ring, length, size, source);
                    let sight = sight(index, source);
                    let ((q, nq), (k, nk)) = sight.ranges(own);
                    if source != index {
                        prop_assert_eq!(nq * nk, own * own / 2);
                    }
                    for &query in &queries[q as usize..(q + nq) as usize] {
                        let keys = &keys[k as usize..(k + nk) as usize];
                        let visible = keys.iter().filter(|&&key| !sight.is_causal() || key <= query);
                        seen.extend(visible.map(|&key| (query, key)));
                    }
                }
                seen.sort_unstable();
                let mut expected: Vec<_> =
                    queries.iter().flat_map(|&q| (0..=q).map(move |k| (q, k))).collect();
                expected.sort_unstable();
                prop_assert_eq!(seen, expected);
            }
        }
    }

    #[test]
    fn a_length_that_cannot_be_divided_is_refused() {
        assert_eq!(positions(Method::Ring, 6, 2, 0), None);
        assert_eq!(positions(Method::Ring, 8, 2, 0), Some(vec![0..2, 6..8]));
        assert_eq!(
            positions(Method::Ulysses, 6, 2, 1),
            Some(std::iter::once(3..6).collect())
        );
    }
}

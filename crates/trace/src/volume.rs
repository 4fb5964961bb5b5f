//! The communication volume of collectives.
//!
//! Closed forms of what the bandwidth-optimal algorithm sends from one rank. Tests compare ledgers with them,
//! and the planner prices communication with them.

use crate::CollectiveKind;

/// The bytes that one rank of a group of `group_size` sends for an input of `payload_bytes`.
///
/// The payload is the rank's input: the full tensor for all-reduce, reduce-scatter, broadcast, reduce and
/// scatter, its shard for all-gather and gather, all its chunks for all-to-all. For collectives with a root,
/// the result applies to the ranks that [send](CollectiveKind::sends). Fractions are rounded up. An
/// all-reduce costs a reduce-scatter and an all-gather; for a reduce-scatter that a backend implements as an
/// all-reduce, pass `AllReduce`.
pub fn sent_bytes(kind: CollectiveKind, group_size: usize, payload_bytes: u64) -> u64 {
    let size = (group_size as u64).max(1);
    let others = size - 1;
    match kind {
        CollectiveKind::AllReduce => fraction(payload_bytes, 2 * others, size),
        CollectiveKind::ReduceScatter | CollectiveKind::AllToAll | CollectiveKind::Scatter => {
            fraction(payload_bytes, others, size)
        }
        CollectiveKind::AllGather | CollectiveKind::Broadcast => {
            payload_bytes.saturating_mul(others)
        }
        CollectiveKind::Reduce | CollectiveKind::Gather | CollectiveKind::Send => {
            if others == 0 {
                0
            } else {
                payload_bytes
            }
        }
        CollectiveKind::Recv | CollectiveKind::Barrier | CollectiveKind::Other => 0,
    }
}

/// The bytes that the rank at `index` sends in an all-to-all with `splits[i]` bytes for the `i`th rank: all but
/// its own.
pub fn all_to_all_sent_bytes(splits: &[u64], index: usize) -> u64 {
    splits
        .iter()
        .enumerate()
        .filter(|&(to, _)| to != index)
        .map(|(_, bytes)| bytes)
        .sum()
}

impl CollectiveKind {
    /// Whether a rank sends anything, depending on whether it is the root.
    pub const fn sends(self, is_root: bool) -> bool {
        match self {
            CollectiveKind::AllReduce
            | CollectiveKind::AllGather
            | CollectiveKind::ReduceScatter
            | CollectiveKind::AllToAll
            | CollectiveKind::Send => true,
            CollectiveKind::Broadcast | CollectiveKind::Scatter => is_root,
            CollectiveKind::Reduce | CollectiveKind::Gather => !is_root,
            CollectiveKind::Recv | CollectiveKind::Barrier | CollectiveKind::Other => false,
        }
    }
}

/// `bytes * numerator / denominator`, rounded up.
fn fraction(bytes: u64, numerator: u64, denominator: u64) -> u64 {
    let exact = (u128::from(bytes) * u128::from(numerator)).div_ceil(u128::from(denominator));
    u64::try_from(exact).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_volumes() {
        let mib = 1 << 20;
        assert_eq!(sent_bytes(CollectiveKind::AllReduce, 2, mib), mib);
        assert_eq!(sent_bytes(CollectiveKind::AllReduce, 4, mib), mib * 3 / 2);
        assert_eq!(sent_bytes(CollectiveKind::AllGather, 4, mib), 3 * mib);
        assert_eq!(
            sent_bytes(CollectiveKind::ReduceScatter, 4, mib),
            mib * 3 / 4
        );
        assert_eq!(sent_bytes(CollectiveKind::AllToAll, 4, mib), mib * 3 / 4);
        assert_eq!(sent_bytes(CollectiveKind::Send, 2, mib), mib);
        assert_eq!(sent_bytes(CollectiveKind::Recv, 2, mib), 0);
        assert_eq!(sent_bytes(CollectiveKind::Barrier, 8, 0), 0);
        assert_eq!(all_to_all_sent_bytes(&[3, 5, 0, 7], 1), 10);
    }

    proptest! {
        #[test]
        fn one_rank_sends_nothing(bytes: u64) {
            for kind in CollectiveKind::ALL {
                prop_assert_eq!(sent_bytes(kind, 1, bytes), 0);
            }
        }

        #[test]
        fn an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
            size in 1usize..1024,
            shard in 0u64..1 << 40,
        ) {
            let full = shard * size as u64;
            prop_assert_eq!(
                sent_bytes(CollectiveKind::AllReduce, size, full),
                sent_bytes(CollectiveKind::ReduceScatter, size, full)
                    + sent_bytes(CollectiveKind::AllGather, size, shard)
            );
        }

        #[test]
        fn even_splits_agree_with_the_closed_form(
            size in 1usize..64,
            chunk in 0u64..1 << 40,
            index: prop::sample::Index,
        ) {
            prop_assert_eq!(
                all_to_all_sent_bytes(&vec![chunk; size], index.index(size)),
                sent_bytes(CollectiveKind::AllToAll, size, chunk * size as u64)
            );
        }
    }
}

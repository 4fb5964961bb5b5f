//! How many bytes a collective must put on the wire.
//!
//! Closed forms of what the bandwidth-optimal algorithm sends from one rank. They are what ledgers
//! are checked against, and what a planner pays for.

use crate::CollectiveKind;

/// The bytes that one rank of `group_size` sends when it hands in `payload_bytes`.
///
/// The payload is the rank's own input: the whole tensor for all-reduce, reduce-scatter, broadcast,
/// reduce and scatter, its shard for all-gather and gather, all its parts for all-to-all. Where a
/// root is involved, the answer is that of the ranks that [send](CollectiveKind::sends). Shares are
/// rounded up. An all-reduce costs a reduce-scatter and an all-gather; a reduce-scatter that is an
/// all-reduce underneath is priced as one by asking for `AllReduce`.
pub fn sent_bytes(kind: CollectiveKind, group_size: usize, payload_bytes: u64) -> u64 {
    let size = (group_size as u64).max(1);
    let others = size - 1;
    match kind {
        CollectiveKind::AllReduce => share(payload_bytes, 2 * others, size),
        CollectiveKind::ReduceScatter | CollectiveKind::AllToAll | CollectiveKind::Scatter => {
            share(payload_bytes, others, size)
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
        CollectiveKind::Recv | CollectiveKind::Barrier => 0,
    }
}

/// The bytes that the rank at `index` sends when it hands `splits[i]` bytes to the `i`th rank: all
/// but what it keeps.
pub fn all_to_all_sent_bytes(splits: &[u64], index: usize) -> u64 {
    splits
        .iter()
        .enumerate()
        .filter(|&(to, _)| to != index)
        .map(|(_, bytes)| bytes)
        .sum()
}

impl CollectiveKind {
    /// Whether a rank, being the root or not, sends anything.
    pub const fn sends(self, is_root: bool) -> bool {
        match self {
            CollectiveKind::AllReduce
            | CollectiveKind::AllGather
            | CollectiveKind::ReduceScatter
            | CollectiveKind::AllToAll
            | CollectiveKind::Send => true,
            CollectiveKind::Broadcast | CollectiveKind::Scatter => is_root,
            CollectiveKind::Reduce | CollectiveKind::Gather => !is_root,
            CollectiveKind::Recv | CollectiveKind::Barrier => false,
        }
    }
}

/// `bytes * numerator / denominator`, rounded up.
fn share(bytes: u64, numerator: u64, denominator: u64) -> u64 {
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
            let whole = shard * size as u64;
            prop_assert_eq!(
                sent_bytes(CollectiveKind::AllReduce, size, whole),
                sent_bytes(CollectiveKind::ReduceScatter, size, whole)
                    + sent_bytes(CollectiveKind::AllGather, size, shard)
            );
        }

        #[test]
        fn even_splits_agree_with_the_closed_form(
            size in 1usize..64,
            part in 0u64..1 << 40,
            index: prop::sample::Index,
        ) {
            prop_assert_eq!(
                all_to_all_sent_bytes(&vec![part; size], index.index(size)),
                sent_bytes(CollectiveKind::AllToAll, size, part * size as u64)
            );
        }
    }
}

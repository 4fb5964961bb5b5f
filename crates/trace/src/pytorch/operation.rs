//! What the names of PyTorch's collectives say about them.

use crate::{CollectiveKind, sent_bytes};

/// Prefixes of the names without underscores, the more specific ones first.
const PREFIXES: [(&str, CollectiveKind); 13] = [
    // NCCL has no barrier; PyTorch reduces one element instead.
    ("allreducebarrier", CollectiveKind::Barrier),
    ("allreduce", CollectiveKind::AllReduce),
    ("sparseallreduce", CollectiveKind::AllReduce),
    ("allgather", CollectiveKind::AllGather),
    ("reducescatter", CollectiveKind::ReduceScatter),
    ("alltoall", CollectiveKind::AllToAll),
    ("broadcast", CollectiveKind::Broadcast),
    ("reduce", CollectiveKind::Reduce),
    ("gather", CollectiveKind::Gather),
    ("scatter", CollectiveKind::Scatter),
    ("send", CollectiveKind::Send),
    ("recv", CollectiveKind::Recv),
    ("barrier", CollectiveKind::Barrier),
];

/// The longest operation is `reduce_scatter_tensor_coalesced`.
const MAX_NAME: usize = 64;

/// The kind of an operation such as `nccl:_all_gather_base`, `nccl:send 0->1`, `c10d::allreduce_` or
/// `all_to_allv`. `None` if it is no communication, or a group of several operations.
pub(super) fn kind(name: &str) -> Option<CollectiveKind> {
    let operation = name
        .rsplit_once(':')
        .map_or(name, |(_, operation)| operation);
    let plain: String = operation
        .chars()
        .filter(|&each| each != '_')
        .take_while(|each| each.is_alphanumeric())
        .map(|each| each.to_ascii_lowercase())
        .take(MAX_NAME)
        .collect();
    PREFIXES
        .iter()
        .find(|(prefix, _)| plain.starts_with(prefix))
        .map(|&(_, kind)| kind)
}

/// The name of a group: `world` for the default group, its description if it has one, or else PyTorch's name.
pub(super) fn group_name(name: &str, description: &str) -> String {
    match description {
        "default_pg" => "world".to_owned(),
        "" | "undefined" => format!("group {name}"),
        _ => description.to_owned(),
    }
}

/// The bytes that this rank sends. PyTorch does not record the root of a collective, so every rank gets an
/// equal share of what its group sends. A scatter has an input on the root only and needs no share.
pub(super) fn sent_by_one(kind: CollectiveKind, group_size: usize, payload_bytes: u64) -> u64 {
    let sent = sent_bytes(kind, group_size, payload_bytes);
    let size = (group_size as u64).max(1);
    match kind {
        CollectiveKind::Broadcast => sent / size,
        CollectiveKind::Reduce | CollectiveKind::Gather => sent - sent / size,
        _ => sent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_every_source_have_their_kind() {
        let cases = [
            ("nccl:all_reduce", CollectiveKind::AllReduce),
            ("nccl:all_reduce_barrier", CollectiveKind::Barrier),
            ("nccl:_all_gather_base", CollectiveKind::AllGather),
            (
                "nccl:reduce_scatter_tensor_coalesced",
                CollectiveKind::ReduceScatter,
            ),
            ("_allgather_base", CollectiveKind::AllGather),
            ("all_to_allv", CollectiveKind::AllToAll),
            ("nccl:_broadcast_oop", CollectiveKind::Broadcast),
            ("nccl:send 0->1", CollectiveKind::Send),
            ("gloo:recvAnySource", CollectiveKind::Recv),
            ("c10d::allreduce_", CollectiveKind::AllReduce),
            ("REDUCE_SCATTER_coalesced", CollectiveKind::ReduceScatter),
        ];
        for (name, expected) in cases {
            assert_eq!(kind(name), Some(expected), "{name}");
        }
        for name in ["nccl:coalesced", "wait", "aten::mm", ""] {
            assert_eq!(kind(name), None, "{name}");
        }
    }

    #[test]
    fn the_shares_of_all_ranks_are_what_the_group_sends() {
        let shares = |kind| 4 * sent_by_one(kind, 4, 1000);
        assert_eq!(shares(CollectiveKind::Broadcast), 3000);
        assert_eq!(shares(CollectiveKind::Reduce), 3000);
        assert_eq!(shares(CollectiveKind::AllReduce), 6000);
    }
}

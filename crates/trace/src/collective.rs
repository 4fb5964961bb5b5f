//! One act of communication, as one rank saw it.

use serde::{Deserialize, Serialize};

use crate::{Purpose, named::named};

named! {
    /// What a group of ranks does together.
    "kind of collective"
    CollectiveKind {
        /// Everyone ends with the sum of what all had.
        AllReduce = "all_reduce",
        /// Everyone ends with what all had, side by side.
        AllGather = "all_gather",
        /// Everyone ends with its part of the sum of what all had.
        ReduceScatter = "reduce_scatter",
        /// Everyone sends everyone a part.
        AllToAll = "all_to_all",
        /// Everyone ends with what the root had.
        Broadcast = "broadcast",
        /// The root ends with the sum of what all had.
        Reduce = "reduce",
        /// The root ends with what all had, side by side.
        Gather = "gather",
        /// Everyone ends with its part of what the root had.
        Scatter = "scatter",
        /// One rank sends to another.
        Send = "send",
        /// One rank receives from another.
        Recv = "recv",
        /// Everyone waits for everyone.
        Barrier = "barrier",
    }
}

/// One collective on one rank. Times are those of [`Ledger::now_ns`](crate::Ledger::now_ns).
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Collective {
    /// What the group did.
    pub kind: CollectiveKind,
    /// The group's name: its mesh axes, such as `dp_replicate`, or `world`.
    pub group: String,
    /// How many ranks the group has.
    pub group_size: usize,
    /// The how-manieth collective of its group, the same number on every rank.
    pub sequence: u64,
    /// What the bytes were for.
    pub purpose: Purpose,
    /// The element type, such as `float32`.
    pub element: String,
    /// The bytes this rank handed in.
    pub payload_bytes: u64,
    /// The bytes this rank put on the wire, by the algorithm used.
    pub sent_bytes: u64,
    /// When the caller asked for it.
    pub issued_ns: u64,
    /// When it began to move bytes.
    pub started_ns: u64,
    /// When it was done.
    pub ended_ns: u64,
    /// From when until when the caller stood in `wait`, if it did.
    pub waited: Option<(u64, u64)>,
}

impl CollectiveKind {
    /// Whether it is a message between two ranks, and not the whole group's.
    pub const fn is_message(self) -> bool {
        matches!(self, CollectiveKind::Send | CollectiveKind::Recv)
    }
}

impl Collective {
    /// How long it took, from its start to its end.
    pub fn duration_ns(&self) -> u64 {
        self.ended_ns.saturating_sub(self.started_ns)
    }

    /// How long the caller stood in `wait`.
    pub fn waited_ns(&self) -> u64 {
        self.waited
            .map_or(0, |(began, ended)| ended.saturating_sub(began))
    }
}

//! Collectives and point-to-point operations, as one rank records them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Purpose, named_enum::named_enum};

named_enum! {
    /// The kind of a communication operation.
    "kind of collective"
    CollectiveKind {
        /// Every rank gets the sum of all inputs.
        AllReduce = "all_reduce",
        /// Every rank gets the concatenation of all inputs.
        AllGather = "all_gather",
        /// Every rank gets its shard of the sum of all inputs.
        ReduceScatter = "reduce_scatter",
        /// Every rank sends a different chunk of its input to every rank.
        AllToAll = "all_to_all",
        /// Every rank gets the input of the root.
        Broadcast = "broadcast",
        /// The root gets the sum of all inputs.
        Reduce = "reduce",
        /// The root gets the concatenation of all inputs.
        Gather = "gather",
        /// Every rank gets its chunk of the root's input.
        Scatter = "scatter",
        /// One rank sends to another.
        Send = "send",
        /// One rank receives from another.
        Recv = "recv",
        /// Every rank waits until all ranks have arrived.
        Barrier = "barrier",
        /// An operation that another program issued, of a kind that Trainyard does not know.
        Other = "other",
    }
}

/// One communication operation on one rank. Times are those of [`Ledger::now_ns`](crate::Ledger::now_ns).
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Collective {
    /// The operation.
    pub kind: CollectiveKind,
    /// The name of the group: its mesh axes, such as `dp_replicate`, or `world`.
    pub group: String,
    /// The number of ranks in the group.
    pub group_size: usize,
    /// The sequence number within the group, which is the same on every rank.
    pub sequence: u64,
    /// What the transferred bytes are for.
    pub purpose: Purpose,
    /// The element type, such as `float32`.
    pub dtype: String,
    /// The size of this rank's input.
    pub payload_bytes: u64,
    /// The bytes that this rank sends over the network with the algorithm used.
    pub sent_bytes: u64,
    /// When the caller issued it.
    pub issued_ns: u64,
    /// When the transfer started.
    pub started_ns: u64,
    /// When it was complete.
    pub ended_ns: u64,
    /// The time during which the caller blocked in `wait`, if it did: begin and end.
    pub waited: Option<(u64, u64)>,
}

impl CollectiveKind {
    /// Whether it is a point-to-point operation (send or receive) instead of a collective of the group.
    pub const fn is_point_to_point(self) -> bool {
        matches!(self, CollectiveKind::Send | CollectiveKind::Recv)
    }
}

impl Collective {
    /// The time from its start to its end.
    pub fn duration_ns(&self) -> u64 {
        self.ended_ns.saturating_sub(self.started_ns)
    }

    /// The time during which the caller blocked in `wait`.
    pub fn waited_ns(&self) -> u64 {
        self.waited
            .map_or(0, |(began, ended)| ended.saturating_sub(began))
    }
}

/// Identifies one collective of a group. All ranks of the group agree on it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct CollectiveId {
    /// The operation.
    pub kind: CollectiveKind,
    /// What the transferred bytes are for.
    pub purpose: Purpose,
    /// The name of the group.
    pub group: String,
    /// The sequence number of the collective within its group.
    pub sequence: u64,
}

impl CollectiveId {
    /// The identity of a recorded collective.
    pub fn of(collective: &Collective) -> CollectiveId {
        CollectiveId {
            kind: collective.kind,
            purpose: collective.purpose,
            group: collective.group.clone(),
            sequence: collective.sequence,
        }
    }

    /// Updates the identity to that of a later collective of the same group.
    pub(crate) fn advance(&mut self, later: &Collective) {
        self.kind = later.kind;
        self.purpose = later.purpose;
        self.sequence = later.sequence;
    }
}

impl fmt::Display for CollectiveId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CollectiveId {
            kind,
            purpose,
            group,
            sequence,
        } = self;
        write!(f, "{kind} {sequence} of {group}")?;
        match purpose {
            Purpose::Unknown => Ok(()),
            _ => write!(f, " ({purpose})"),
        }
    }
}

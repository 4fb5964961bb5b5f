//! Why an agent is not listened to.

use serde::{Deserialize, Serialize};

use crate::{Close, Epoch};

/// Why something an agent said was not acted on.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// It holds no lease: it never joined, or was not heard of for too long.
    #[error("node `{node}` holds no lease (it expired, or was never given): join again")]
    NoLease {
        /// The node.
        node: String,
    },
    /// Another agent of this name holds a lease.
    #[error(
        "another agent is already there as node `{node}`: give each node a name of its own; after a crash \
         the name is free when the lease of the old one expires"
    )]
    NameTaken {
        /// The name.
        node: String,
    },
    /// Another agent asked for this rank.
    #[error("node rank {rank} is already asked for by node `{by}`")]
    RankTaken {
        /// The rank.
        rank: u32,
        /// Who asked for it first.
        by: String,
    },
    /// The rank is not in any world of this run.
    #[error("node rank {rank} does not exist: at most {max_nodes} nodes are asked for")]
    RankTooHigh {
        /// The rank.
        rank: u32,
        /// The most nodes.
        max_nodes: u32,
    },
    /// It is about a world that is not the one that runs.
    #[error("this is about {given}, but the run is at {current}")]
    StaleEpoch {
        /// What the agent spoke of.
        given: Epoch,
        /// Where the run is.
        current: Epoch,
    },
    /// It has no place in the world it speaks of.
    #[error("node `{node}` is not in the world of {epoch}")]
    NotAMember {
        /// The node.
        node: String,
        /// The world.
        epoch: Epoch,
    },
    /// It is meant for another run.
    #[error("this is run `{expected}`, not `{given}`: check --rdzv-id and --rdzv-endpoint")]
    OtherRun {
        /// The run that is served.
        expected: String,
        /// The run it asked for.
        given: String,
    },
    /// It asks for other worlds than those that joined before.
    #[error(
        "node `{node}` was started with other options (nnodes, restarts or timeouts) than the first: {differs}"
    )]
    OtherPolicy {
        /// The node.
        node: String,
        /// The first difference.
        differs: String,
    },
    /// It lacks what the run needs.
    #[error("node `{node}` lacks the capability `{capability}`")]
    Lacks {
        /// The node.
        node: String,
        /// What it lacks.
        capability: String,
    },
    /// The run is over.
    #[error("the run is over: {0}")]
    Closed(Close),
    /// More agents than anybody can want.
    #[error("{most} agents are attending already")]
    TooMany {
        /// The limit.
        most: usize,
    },
    /// It is not something an agent would say.
    #[error("not understood: {what}")]
    Malformed {
        /// What is wrong.
        what: String,
    },
}

impl Refusal {
    pub(crate) fn malformed(what: String) -> Refusal {
        Refusal::Malformed { what }
    }

    /// Whether it is of use to try to join again later, unchanged.
    pub fn passes(&self) -> bool {
        matches!(
            self,
            Refusal::NoLease { .. }
                | Refusal::NameTaken { .. }
                | Refusal::RankTaken { .. }
                | Refusal::TooMany { .. }
        )
    }
}

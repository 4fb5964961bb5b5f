//! Why an agent's request is rejected.

use serde::{Deserialize, Serialize};

use crate::{Epoch, RunOutcome};

/// Why an agent's request was rejected.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// The agent holds no lease.
    #[error("node `{node}` holds no lease (it expired, or was never granted): join again")]
    NoLease {
        /// The agent's node.
        node: String,
    },
    /// Another agent of the same name holds a lease.
    #[error(
        "another agent has already joined as node `{node}`: give every node a unique name; after a crash the name \
         is free again when the lease of the crashed agent expires"
    )]
    NameTaken {
        /// The name.
        node: String,
    },
    /// Another agent requested the same node rank.
    #[error("node `{by}` already requested node rank {rank}")]
    RankTaken {
        /// The rank.
        rank: u32,
        /// The node that requested it first.
        by: String,
    },
    /// The requested node rank cannot exist in this run.
    #[error("node rank {rank} is out of range: the run has at most {max_nodes} nodes")]
    RankOutOfRange {
        /// The rank.
        rank: u32,
        /// The maximum number of nodes.
        max_nodes: u32,
    },
    /// The report is about another epoch than the current one.
    #[error("the report is about {given}, but the run is at {current}")]
    StaleEpoch {
        /// The epoch of the report.
        given: Epoch,
        /// The epoch of the run.
        current: Epoch,
    },
    /// The node has no rank in the world of this epoch.
    #[error("node `{node}` is not in the world of {epoch}")]
    NotInWorld {
        /// The node.
        node: String,
        /// The epoch.
        epoch: Epoch,
    },
    /// The agent asked for another run.
    #[error("this is run `{expected}`, not `{given}`: check --rdzv-id and --rdzv-endpoint")]
    WrongRun {
        /// The run of this rendezvous.
        expected: String,
        /// The run that the agent asked for.
        given: String,
    },
    /// The agent executes another program than the first agent: it belongs to another job.
    #[error(
        "node `{node}` would execute `{given}`, but this run executes `{expected}`: it belongs to another job; give every \
         job its own --rdzv-id"
    )]
    OtherProgram {
        /// The node.
        node: String,
        /// The program of the run.
        expected: String,
        /// The program of the node.
        given: String,
    },
    /// The agent's policy differs from that of the first agent.
    #[error(
        "node `{node}` was started with other options (nnodes, restarts or timeouts) than the first node: {difference}"
    )]
    PolicyMismatch {
        /// The node.
        node: String,
        /// The first difference.
        difference: String,
    },
    /// The node lacks a capability that the run requires.
    #[error("node `{node}` lacks the required capability `{capability}`")]
    MissingCapability {
        /// The node.
        node: String,
        /// The capability.
        capability: String,
    },
    /// The run has ended.
    #[error("the run has ended: {0}")]
    Closed(RunOutcome),
    /// The run has the maximum number of members.
    #[error("the run already has the maximum of {max} nodes")]
    TooManyNodes {
        /// The maximum.
        max: usize,
    },
    /// The request is invalid.
    #[error("invalid request: {what}")]
    Malformed {
        /// What is wrong with it.
        what: String,
    },
}

impl Rejection {
    pub(crate) fn malformed(what: String) -> Rejection {
        Rejection::Malformed { what }
    }

    /// Whether the same join may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Rejection::NoLease { .. }
                | Rejection::NameTaken { .. }
                | Rejection::RankTaken { .. }
                | Rejection::TooManyNodes { .. }
        )
    }
}

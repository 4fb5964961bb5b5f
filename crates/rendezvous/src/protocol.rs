//! The messages between an agent and a server.
//!
//! Every request has an id, and every acknowledgment and rejection names the request it belongs to. Requests may be
//! lost, duplicated or reordered: an agent repeats what was not acknowledged with its next heartbeat, and a duplicate
//! changes nothing.

use serde::{Deserialize, Serialize};

use crate::{Decision, Epoch, Event, Join, Rejection, Report};

/// A message from an agent to the server.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Identifies the request within a session.
    pub id: u64,
    /// The node of the sender.
    pub node: String,
    /// The instance of the sender.
    pub instance: u64,
    /// What the agent requests.
    pub kind: RequestKind,
}

/// What an agent can request.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum RequestKind {
    /// Join the run, or join it again after a disconnect.
    Join(Box<Join>),
    /// Renew the lease.
    Heartbeat {
        /// The version of the run state whose decision the agent knows.
        known: Option<u64>,
    },
    /// Report the state of the workers.
    Report {
        /// The epoch of the workers.
        epoch: Epoch,
        /// Their state.
        report: Report,
    },
    /// Leave the run.
    Leave,
}

/// A message from the server to an agent.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Response {
    /// The server accepted a request.
    Ack {
        /// The id of the request.
        id: u64,
        /// The version of the run state at that time.
        version: u64,
    },
    /// The server rejected a request.
    Rejected {
        /// The id of the request.
        id: u64,
        /// The reason.
        rejection: Rejection,
    },
    /// What the agent must do from now on. The server sends it without a request.
    Decision {
        /// The version of the run state that the decision is from.
        version: u64,
        /// The decision.
        decision: Decision,
    },
}

impl Request {
    /// The event that the request is to the decision function.
    pub fn into_event(self) -> Event {
        let Request { node, instance, .. } = self;
        match self.kind {
            RequestKind::Join(join) => Event::Join(join),
            RequestKind::Heartbeat { .. } => Event::Heartbeat { node, instance },
            RequestKind::Report { epoch, report } => Event::Report {
                node,
                instance,
                epoch,
                report,
            },
            RequestKind::Leave => Event::Leave { node, instance },
        }
    }
}

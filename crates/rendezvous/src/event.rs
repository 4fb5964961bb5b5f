//! The events on which the decision depends.

use serde::{Deserialize, Serialize};

use crate::{Epoch, Join, Rejection};

/// Something that happened to a run.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Event {
    /// An agent joins, or joins again after its connection broke.
    Join(Box<Join>),
    /// An agent renews its lease.
    Heartbeat {
        /// The agent's node.
        node: String,
        /// The agent's instance.
        instance: u64,
    },
    /// An agent reports the state of its workers.
    Report {
        /// The agent's node.
        node: String,
        /// The agent's instance.
        instance: u64,
        /// The epoch of the workers.
        epoch: Epoch,
        /// Their state.
        report: Report,
    },
    /// An agent leaves the run.
    Leave {
        /// The agent's node.
        node: String,
        /// The agent's instance.
        instance: u64,
    },
    /// The lease of an agent expired on the clock of an external lease service, such as etcd.
    Lost {
        /// The agent's node.
        node: String,
    },
    /// Only time passed.
    Tick,
}

/// What an agent reports about its workers.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Report {
    /// All workers exited successfully.
    Succeeded,
    /// A worker failed.
    Failed {
        /// Which worker and how, for people to read.
        message: String,
        /// Whether a restart would not help.
        is_final: bool,
    },
    /// No workers are left: the agent stopped them because it had to wait, or because its lease expired.
    Stopped,
}

impl Report {
    /// The maximum length of the message about a failure, in bytes.
    pub const MAX_MESSAGE_BYTES: usize = 2048;

    /// Rejects a report that is too large to store.
    pub(crate) fn check(&self) -> Result<(), Rejection> {
        match self {
            Report::Failed { message, .. } if message.len() > Report::MAX_MESSAGE_BYTES => {
                Err(Rejection::malformed(format!(
                    "a failure message of {} bytes; the maximum is {}",
                    message.len(),
                    Report::MAX_MESSAGE_BYTES
                )))
            }
            _ => Ok(()),
        }
    }
}

//! What can happen to a run, as whoever decides hears of it.

use serde::{Deserialize, Serialize};

use crate::{Epoch, Join, Refusal};

/// Something that happened.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Event {
    /// An agent joins, or says again that it is there after its connection broke.
    Join(Box<Join>),
    /// An agent is there.
    Heartbeat {
        /// Its node.
        node: String,
        /// Its instance.
        instance: u64,
    },
    /// An agent says how its workers of an epoch are.
    Report {
        /// Its node.
        node: String,
        /// Its instance.
        instance: u64,
        /// Of which world it speaks.
        epoch: Epoch,
        /// What it says.
        report: Report,
    },
    /// An agent goes.
    Leave {
        /// Its node.
        node: String,
        /// Its instance.
        instance: u64,
    },
    /// An agent's lease is over, says whoever keeps the leases.
    Lost {
        /// Its node.
        node: String,
    },
    /// Nothing but time passed.
    Tick,
}

/// What an agent says of its workers.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Report {
    /// They have ended well, all of them.
    Succeeded,
    /// One failed.
    Failed {
        /// Which and how, for people.
        message: String,
    },
    /// None is left: it was told to wait, or lost its lease.
    Stopped,
}

impl Report {
    /// The longest words about a failure that are listened to, in bytes.
    pub const LONGEST_MESSAGE: usize = 2048;

    /// Whether it is of a size that can be kept.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        let most = Report::LONGEST_MESSAGE;
        match self {
            Report::Failed { message } if message.len() > most => {
                let length = message.len();
                Err(Refusal::malformed(format!(
                    "a message of {length} bytes, and {most} are the most"
                )))
            }
            _ => Ok(()),
        }
    }
}

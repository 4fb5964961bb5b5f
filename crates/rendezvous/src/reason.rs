//! Why a run is in its current phase, for people to read.

use std::fmt;
use std::time::Duration;

use crate::{Cause, Epoch, Rejection, RunOutcome};

/// Why the run is in its current phase after a step.
#[derive(Clone, Debug, Eq, PartialEq)]
#[allow(missing_docs)] // the message of each variant explains its fields
pub enum Reason {
    /// Too few nodes have joined.
    TooFewNodes { have: usize, need: u32 },
    /// Enough nodes have joined, and more may still join.
    LastCall {
        have: usize,
        most: u32,
        ends: Duration,
    },
    /// Some members of the invalidated world have not stopped their workers yet.
    Stopping { left: usize },
    /// The workers run.
    Running { epoch: Epoch, standby: usize },
    /// A world was formed.
    Formed { epoch: Epoch, nodes: usize },
    /// The world was invalidated.
    Invalidated { epoch: Epoch, cause: Cause },
    /// The run has ended.
    Closed(RunOutcome),
    /// The event was rejected.
    Rejected(Rejection),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::TooFewNodes { have, need } => {
                write!(f, "{have} of at least {need} nodes have joined")
            }
            Reason::LastCall { have, most, .. } => {
                write!(
                    f,
                    "{have} of up to {most} nodes have joined; waiting for more"
                )
            }
            Reason::Stopping { left } => {
                write!(f, "nodes that have not stopped their workers yet: {left}")
            }
            Reason::Running { epoch, standby } => {
                write!(f, "{epoch} is running; nodes on standby: {standby}")
            }
            Reason::Formed { epoch, nodes } => write!(f, "{epoch} formed; nodes: {nodes}"),
            Reason::Invalidated { epoch, cause } => write!(f, "{epoch} invalidated: {cause}"),
            Reason::Closed(outcome) => write!(f, "the run has ended: {outcome}"),
            Reason::Rejected(rejection) => write!(f, "rejected: {rejection}"),
        }
    }
}

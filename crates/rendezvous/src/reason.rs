//! Why a run is as it is, for people.

use std::fmt;
use std::time::Duration;

use crate::{Cause, Close, Epoch, Refusal};

/// Why things are as they are after a step.
#[derive(Clone, Debug, Eq, PartialEq)]
#[allow(missing_docs)] // the fields are what the words say
pub enum Reason {
    /// Too few nodes.
    TooFew { have: usize, need: u32 },
    /// Enough nodes; others may still come.
    LastCall {
        have: usize,
        most: u32,
        ends: Duration,
    },
    /// Some members of the broken world have not stopped their workers yet.
    Stopping { left: usize },
    /// The world works.
    Running { epoch: Epoch, parked: usize },
    /// A world was formed.
    Formed { epoch: Epoch, nodes: usize },
    /// The world was broken.
    Broke { epoch: Epoch, cause: Cause },
    /// The run is over.
    Closed(Close),
    /// The event was refused.
    Refused(Refusal),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::TooFew { have, need } => write!(f, "{have} of at least {need} nodes are there"),
            Reason::LastCall { have, most, .. } => {
                write!(f, "{have} nodes are there; last call for up to {most}")
            }
            Reason::Stopping { left } => {
                write!(f, "{left} nodes still have workers of the last world")
            }
            Reason::Running { epoch, parked } => {
                write!(f, "{epoch} runs; {parked} nodes are parked")
            }
            Reason::Formed { epoch, nodes } => write!(f, "{epoch} formed of {nodes} nodes"),
            Reason::Broke { epoch, cause } => write!(f, "{epoch} broken: {cause}"),
            Reason::Closed(how) => write!(f, "the run is over: {how}"),
            Reason::Refused(refusal) => write!(f, "refused: {refusal}"),
        }
    }
}

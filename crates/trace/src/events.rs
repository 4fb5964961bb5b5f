//! The recorded events of one rank.

use serde::{Deserialize, Serialize};

use crate::{Allocation, Collective, Operator, Span};

/// The events of one rank, each kind in the order of recording.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Events {
    /// The rank.
    pub rank: usize,
    /// Collectives and point-to-point operations.
    pub collectives: Vec<Collective>,
    /// Time spans, such as forward and backward passes.
    pub spans: Vec<Span>,
    /// Operator calls.
    pub operators: Vec<Operator>,
    /// Memory allocations and releases.
    pub allocations: Vec<Allocation>,
}

//! Everything a rank kept of what it did.

use serde::{Deserialize, Serialize};

use crate::{Allocation, Collective, Operator, Span};

/// The events of one rank, each kind in the order in which it was written.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Events {
    /// Whose events they are.
    pub rank: usize,
    /// Acts of communication.
    pub collectives: Vec<Collective>,
    /// Stretches of time.
    pub spans: Vec<Span>,
    /// Kernel calls.
    pub operators: Vec<Operator>,
    /// Memory taken and given back.
    pub allocations: Vec<Allocation>,
}

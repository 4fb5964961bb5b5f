//! What memory is held for.

use serde::{Deserialize, Serialize};

use crate::named::named;

named! {
    /// What an allocation is for.
    "kind of memory"
    MemoryKind {
        /// Parameters, sharded or gathered.
        Parameter = "parameter",
        /// Gradients and their buckets.
        Gradient = "gradient",
        /// Optimiser state.
        Optimizer = "optimizer",
        /// What forward keeps for backward, and what passes between layers.
        Activation = "activation",
        /// Buffers of collectives.
        Communication = "communication",
        /// Anything else.
        Other = "other",
    }
}

impl MemoryKind {
    /// What a report calls the bytes of this kind.
    pub const fn plural(self) -> &'static str {
        match self {
            MemoryKind::Parameter => "parameters",
            MemoryKind::Gradient => "gradients",
            MemoryKind::Activation => "activations",
            MemoryKind::Optimizer | MemoryKind::Communication | MemoryKind::Other => self.name(),
        }
    }
}

/// Memory taken or given back.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Allocation {
    /// What the memory is for.
    pub kind: MemoryKind,
    /// Bytes taken; given back when negative.
    pub bytes: i64,
    /// When.
    pub at_ns: u64,
}

//! Memory allocations and what they are for.

use serde::{Deserialize, Serialize};

use crate::named_enum::named_enum;

named_enum! {
    /// What an allocation is for.
    "kind of memory"
    MemoryKind {
        /// Parameters, sharded or gathered.
        Parameter = "parameter",
        /// Gradients and their buckets.
        Gradient = "gradient",
        /// Optimizer state.
        Optimizer = "optimizer",
        /// Activations, including tensors saved for backward.
        Activation = "activation",
        /// Buffers of collectives.
        Communication = "communication",
        /// All other allocations.
        Other = "other",
    }
}

impl MemoryKind {
    /// The name of this kind in reports.
    pub const fn plural(self) -> &'static str {
        match self {
            MemoryKind::Parameter => "parameters",
            MemoryKind::Gradient => "gradients",
            MemoryKind::Activation => "activations",
            MemoryKind::Optimizer | MemoryKind::Communication | MemoryKind::Other => self.name(),
        }
    }
}

/// An allocation or a release of memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Allocation {
    /// What the memory is for.
    pub kind: MemoryKind,
    /// Allocated bytes; negative for a release.
    pub bytes: i64,
    /// The time of the event.
    pub at_ns: u64,
}

//! What communication is for.

use crate::named_enum::named_enum;

named_enum! {
    /// What the bytes of a collective are for.
    "purpose"
    Purpose {
        /// Reduction of gradients.
        Gradient = "gradient",
        /// Reduction of outer gradients, which join replicas that take steps of their own.
        OuterGradient = "outer_gradient",
        /// All-gather of sharded parameters, or broadcast of initial parameters.
        Parameter = "parameter",
        /// Activations and their gradients, in tensor, sequence, context and pipeline parallelism.
        Activation = "activation",
        /// Tokens sent to their experts; in backward, the gradients of the experts' outputs.
        Dispatch = "dispatch",
        /// Expert outputs sent back to their tokens; in backward, the gradients of the experts' inputs.
        Combine = "combine",
        /// Optimizer state, checkpoints and buffers.
        State = "state",
        /// Control data: norms, counts, flags, barriers.
        Control = "control",
        /// Not known: another program issued the collective.
        Unknown = "unknown",
    }
}

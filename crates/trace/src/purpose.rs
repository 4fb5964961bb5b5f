//! Why bytes travel.

use crate::named::named;

named! {
    /// What a collective moves bytes for.
    "purpose"
    Purpose {
        /// Gradients on their way to the optimiser.
        Gradient = "gradient",
        /// Parameters gathered for computing, or broadcast at the start.
        Parameter = "parameter",
        /// Activations, and their gradients, between ranks that share a forward.
        Activation = "activation",
        /// Tokens on their way to their experts; in backward, gradients of what those computed.
        Dispatch = "dispatch",
        /// What experts computed on its way back; in backward, gradients of what they were given.
        Combine = "combine",
        /// Optimiser state, checkpoints and buffers.
        State = "state",
        /// Agreement among ranks: norms, counts, flags, barriers.
        Control = "control",
    }
}

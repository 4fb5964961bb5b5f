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
        /// Tokens routed to experts and back.
        Token = "token",
        /// Optimiser state, checkpoints and buffers.
        State = "state",
        /// Agreement among ranks: norms, counts, flags, barriers.
        Control = "control",
    }
}

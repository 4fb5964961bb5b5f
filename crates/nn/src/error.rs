//! Errors of building, running, saving and loading models.

use tch::TchError;
use trainyard_torch::TorchError;

use crate::{Event, weights::WeightsError};

/// The result type of this crate.
pub type Result<T, E = NnError> = std::result::Result<T, E>;

/// Why a model could not be built, run, saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum NnError {
    /// Document masking with ring attention, which does not support it.
    #[error(
        "ring attention does not support document masking: use context_parallel_method = \"ulysses\""
    )]
    DocumentMaskInRing,
    /// A sliding window with ring attention, which does not support it.
    #[error(
        "ring attention does not support sliding windows: use context_parallel_method = \"ulysses\""
    )]
    WindowInRing,
    /// An encoder with ring attention, which is causal.
    #[error(
        "ring attention is causal, but an encoder attends to all positions: use context_parallel_method = \"ulysses\""
    )]
    BidirectionalInRing,
    /// Document masking in an encoder.
    #[error("an encoder does not support document masking: use attn_mask_type = \"causal\"")]
    DocumentMaskInEncoder,
    /// Document masking in a block with a sliding window.
    #[error(
        "documents and sliding windows together are not built: use attn_mask_type = \"causal\""
    )]
    DocumentMaskInWindow,
    /// An MoE layer with tensor parallelism but without sequence parallelism.
    #[error(
        "an MoE layer with tensor parallelism needs sequence parallelism: use enable_sequence_parallel = true"
    )]
    MoeNeedsSequenceParallel,
    /// A layer has an auxiliary loss, but the context has no loss weight.
    #[error(
        "the router has an auxiliary loss, but the context has no loss weight: use Context::with_loss_weight"
    )]
    MissingLossWeight,
    /// A libtorch operation failed.
    #[error(transparent)]
    Torch(#[from] TorchError),

    /// A hook of a strategy failed.
    #[error("{event} hook of unit {unit} failed: {source}")]
    Hook {
        /// The event for which it was called.
        event: Event,
        /// The unit that was running.
        unit: String,
        /// The error of the hook.
        source: Box<NnError>,
    },

    /// An error of a strategy in a higher-level crate.
    #[error(transparent)]
    Strategy(Box<dyn std::error::Error + Send + Sync>),

    /// Backward reached a unit whose [`Run`](crate::Run) was dropped or bypassed.
    #[error(
        "backward reached unit {unit} outside of Run::backward, so hooks would not be called: \
         keep the Run and call Run::backward(&loss) instead of loss.backward()"
    )]
    BackwardWithoutRun {
        /// The name of the unit.
        unit: String,
    },

    /// A [`ThreadBound`](crate::ThreadBound) value was accessed on another thread.
    #[error(
        "a value was accessed on another thread than its own: run forward and backward on the same thread"
    )]
    OtherThread,

    /// A sequence is longer than the model was built for, or, with context parallelism, shorter.
    #[error(
        "the sequence length is {length}, but the model was built for {limit}: build it for this length"
    )]
    SequenceTooLong {
        /// The length of the input sequence.
        length: i64,
        /// The sequence length that the model was built for.
        limit: i64,
    },

    /// The description of a model is inconsistent.
    #[error(transparent)]
    Arch(#[from] trainyard_arch::ArchError),

    /// A size is not divisible by the number of ranks.
    #[error(
        "{what} ({length}) is not divisible by {num_ranks} ranks: use a number of ranks that divides it"
    )]
    NotDivisible {
        /// What is to be sharded.
        what: String,
        /// Its size.
        length: usize,
        /// The number of ranks.
        num_ranks: usize,
    },

    /// A plan names a unit that the model does not have.
    #[error("the model has no unit {name:?}: its units are {}", units.join(", "))]
    UnknownUnit {
        /// The name of the plan.
        name: String,
        /// The units of the model.
        units: Vec<String>,
    },

    /// A unit that cannot be sharded as a whole.
    #[error(
        "unit {unit} has {num_weights} weights, but a sharded unit has one matrix or convolution and at most one bias: divide it \
         into several units, or build it with tensor-parallel layers"
    )]
    NotOneWeight {
        /// The unit.
        unit: String,
        /// Its parameters of two dims or more.
        num_weights: usize,
    },

    /// Variables that belong to none of an adapted model's units.
    #[error(
        "no unit owns {}: a unit owns the variables whose names start with its own name and a dot \
         (units: {})", names.join(", "), units.join(", ")
    )]
    Unowned {
        /// The names of the variables.
        names: Vec<String>,
        /// The names of the units.
        units: Vec<String>,
    },

    /// Two units of an adapted model have the same name.
    #[error("two units are called {unit}: unit names must be unique")]
    RepeatedUnit {
        /// The repeated name.
        unit: String,
    },

    /// A weights file could not be written or read.
    #[error(transparent)]
    Weights(#[from] Box<WeightsError>),
}

impl From<TchError> for NnError {
    fn from(error: TchError) -> NnError {
        NnError::Torch(error.into())
    }
}

impl NnError {
    /// Wraps an error of a higher-level crate, so that it can pass through a model.
    pub fn strategy(error: impl std::error::Error + Send + Sync + 'static) -> NnError {
        NnError::Strategy(Box::new(error))
    }
}

impl From<WeightsError> for NnError {
    fn from(error: WeightsError) -> NnError {
        NnError::Weights(Box::new(error))
    }
}

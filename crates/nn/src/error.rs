//! What can go wrong in a model, told with the operands.

use tch::TchError;
use trainyard_torch::TorchError;

use crate::{Event, weights::WeightsError};

/// The result of anything in this crate.
pub type Result<T, E = NnError> = std::result::Result<T, E>;

/// Why a model could not be built, run, saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum NnError {
    /// Documents that must not see each other, in sequences whose keys go round.
    #[error(
        "documents cannot be kept apart where keys and values go round a ring: use \
         context_parallel_method = \"ulysses\""
    )]
    DocumentsInARing,
    /// Experts, where tensor-parallel ranks all have all positions.
    #[error(
        "experts divide positions over the ranks that share matrices, but those all have all: use \
         enable_sequence_parallel = true"
    )]
    WholeSequences,
    /// A layer adds to a loss whose weight it does not know.
    #[error(
        "experts are balanced by a loss, but the context does not tell what losses are divided by: \
         use Context::with_loss_weight"
    )]
    LossWeight,
    /// libtorch refused an operation.
    #[error(transparent)]
    Torch(#[from] TorchError),

    /// A strategy failed at the call site of a unit.
    #[error("{event} of unit {unit}: {source}")]
    Intercept {
        /// When it was called.
        event: Event,
        /// The unit that was running.
        unit: String,
        /// What it reported.
        source: Box<NnError>,
    },

    /// An error of a crate above this one, carried through a model.
    #[error(transparent)]
    Strategy(Box<dyn std::error::Error + Send + Sync>),

    /// Backward reached a unit without its run.
    #[error(
        "backward reached unit {unit} without its run, so strategies would miss events: \
         keep the Run and call Run::backward(&loss) instead of loss.backward()"
    )]
    BackwardWithoutRun {
        /// The unit.
        unit: String,
    },

    /// A value bound to one thread was asked for on another.
    #[error(
        "a value bound to another thread was asked for: run forward and backward on one thread"
    )]
    OtherThread,

    /// A sequence is longer than the model was built for, or, where ranks share it, shorter.
    #[error("a sequence of {length} positions in a model built for {limit}: build it for as many")]
    SequenceTooLong {
        /// Positions in the input.
        length: i64,
        /// Positions the model has tables for.
        limit: i64,
    },

    /// A model's sizes contradict each other.
    #[error("{model}: {reason}")]
    Sizes {
        /// The model.
        model: &'static str,
        /// What does not fit.
        reason: String,
    },

    /// Ranks cannot share something evenly.
    #[error(
        "{what}: {length} cannot be shared evenly by {num_ranks} ranks: \
         use a number of ranks that divides it"
    )]
    Uneven {
        /// What is to be shared.
        what: String,
        /// How many there are.
        length: usize,
        /// How many ranks there are.
        num_ranks: usize,
    },

    /// Variables that belong to none of an adapted model's units.
    #[error(
        "no unit owns {}: a unit owns the variables whose names begin with its own and a dot \
         (units: {})", names.join(", "), units.join(", ")
    )]
    Unowned {
        /// The variables.
        names: Vec<String>,
        /// The units there are.
        units: Vec<String>,
    },

    /// Two units of an adapted model have one name.
    #[error("two units are called {unit}: names of units must differ")]
    RepeatedUnit {
        /// The name.
        unit: String,
    },

    /// A file of weights could not be written or read.
    #[error(transparent)]
    Weights(#[from] Box<WeightsError>),
}

impl From<TchError> for NnError {
    fn from(error: TchError) -> NnError {
        NnError::Torch(error.into())
    }
}

impl NnError {
    /// Wraps the error of a crate above this one, so that it can pass through a model.
    pub fn strategy(error: impl std::error::Error + Send + Sync + 'static) -> NnError {
        NnError::Strategy(Box::new(error))
    }
}

impl From<WeightsError> for NnError {
    fn from(error: WeightsError) -> NnError {
        NnError::Weights(Box::new(error))
    }
}

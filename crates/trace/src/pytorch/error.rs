//! Why a file of PyTorch cannot be read.

use super::pickle::PickleError;

/// Why a Flight Recorder dump or a profiler trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PytorchError {
    /// It is no pickle of plain data.
    #[error(transparent)]
    Pickle(#[from] PickleError),
    /// It is no JSON of the expected form.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// Neither the file nor its name has the rank.
    #[error(
        "it does not have its rank; the name of a Flight Recorder dump must end with the rank, such as `dump_0`"
    )]
    NoRank,
}

//! What PyTorch itself records: dumps of its Flight Recorder, and traces of its profiler.

mod diagnosis;
mod dump;
mod element_type;
mod error;
mod file_name;
mod flight_recorder;
mod frame;
mod kineto;
mod opcode;
mod operation;
mod pickle;
mod pickle_value;
pub(crate) mod profiler;
mod wording;

pub use diagnosis::diagnose;
pub use error::PytorchError;
pub(crate) use file_name::{may_be_trace, trailing_rank};
pub(crate) use flight_recorder::count_members;
pub use flight_recorder::{FlightRecorder, RecordedCall};
pub use frame::Frame;
pub use pickle::PickleError;
pub(crate) use pickle::is_pickle;

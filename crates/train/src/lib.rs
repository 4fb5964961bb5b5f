//! From a config to a running job: the loop, optimisers, schedules, metrics.

pub mod build;
pub mod clip;
pub mod dry_run;
mod error;
pub mod job;
mod memory_capacity;
pub mod metrics;
pub mod optimizer;
mod schedule;
mod trainer;
mod zero;

pub use error::{Result, TrainError};
pub use memory_capacity::memory_capacity;
pub use schedule::Schedule;
pub use trainer::{StepOutcome, Trainer, data_axes};

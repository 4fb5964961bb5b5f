//! From a config to a running job: the loop, optimisers, schedules, metrics.

pub mod build;
pub mod checkpoint;
pub mod clip;
pub mod dry_run;
mod error;
mod expert_traffic;
mod fits;
mod heart;
pub mod job;
mod leave;
mod loads;
mod memory_capacity;
mod memory_report;
pub mod metrics;
pub mod optimizer;
mod pipeline;
mod recompute;
mod sample_log;
mod schedule;
mod trainer;
pub mod whole_state;
mod zero;

pub use error::{Result, TrainError};
pub use expert_traffic::{ExpertTraffic, Pace};
pub use loads::ExpertLoad;
pub use memory_capacity::memory_capacity;
pub use schedule::Schedule;
pub use trainer::{StepOutcome, Trainer, data_axes, loss_axes};

//! The training loop: from a config to a running job, with optimizers, learning rate schedules,
//! checkpoints and metrics.

pub mod build;
pub mod checkpoint;
pub mod clip;
pub mod dry_run;
mod error;
mod expert_load;
mod expert_traffic;
pub mod full_state_dict;
mod heartbeat_writer;
pub mod job;
mod memory_capacity;
mod memory_check;
mod memory_profiler;
pub mod metrics;
pub mod optimizer;
mod pipeline;
mod preemption;
mod recompute;
mod sample_log;
mod scalar;
mod schedule;
mod trainer;

pub use error::{Result, TrainError};
pub use expert_load::ExpertLoad;
pub use expert_traffic::{ExpertTraffic, TransferStats};
pub use memory_capacity::memory_capacity;
pub use schedule::Schedule;
pub use trainer::{StepOutcome, Trainer, data_axes, loss_axes};

//! The training loop: from a config to a running job, with optimizers, learning rate schedules,
//! checkpoints and metrics.

mod agreement;
mod bit_flip;
pub mod build;
pub mod checkpoint;
pub mod clip;
pub mod dry_run;
mod error;
mod expert_load;
mod expert_traffic;
mod fingerprint;
mod flops;
pub mod full_state_dict;
mod heartbeat_writer;
mod incident_policy;
pub mod job;
mod late_values;
mod memory_capacity;
mod memory_check;
mod memory_profiler;
pub mod metrics;
pub mod optimizer;
mod pipeline;
mod preemption;
mod recompute;
mod registry;
mod replica_digest;
mod rerun;
mod same_job;
mod sample_layout;
mod sample_log;
mod schedule;
mod spike;
mod train_spec;
mod trainer;
mod value_guard;

pub use error::{Result, TrainError};
pub use expert_load::ExpertLoad;
pub use expert_traffic::{ExpertTraffic, TransferStats};
pub use memory_capacity::memory_capacity;
pub use registry::{NoKeys, Registry};
pub use replica_digest::Drift;
pub use schedule::Schedule;
pub use train_spec::TrainSpec;
pub use trainer::{StepOutcome, Trainer, data_axes, loss_axes};
pub use value_guard::{GuardState, Incident};

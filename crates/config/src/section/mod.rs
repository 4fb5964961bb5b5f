//! The sections of the config file, one file each: keys, defaults, and validation within the section.

mod activation_checkpoint;
mod checkpoint;
mod comm;
mod debug;
mod job;
mod local_updates;
mod lr_scheduler;
mod metrics;
mod model;
mod moe;
mod optimizer;
mod parallelism;
mod parameter_server;
mod profiling;
mod training;
mod validation;
mod value_guard;

pub use activation_checkpoint::{
    ActivationCheckpointMode, ActivationCheckpointSection, SelectiveOption,
};
pub use checkpoint::{AsyncMode, CheckpointSection, ResumeChange};
pub use comm::{Backend, CommSection};
pub use debug::{BitFlip, DebugSection};
pub use job::JobSection;
pub use local_updates::{LocalUpdateMethod, LocalUpdatesSection};
pub use lr_scheduler::{DecayType, LrSchedulerSection};
pub use metrics::MetricsSection;
pub use model::{AttentionMask, ModelName, ModelSection};
pub use moe::MoeSection;
pub use optimizer::{OptimizerImplementation, OptimizerName, OptimizerSection};
pub use parallelism::{
    ContextMethod, GradientCompression, Offload, OffloadStates, ParallelismSection,
    ParameterCompression, PipelineReduce, ReshardAfterForward,
};
pub use parameter_server::{ParameterServerSection, Staleness};
pub use profiling::ProfilingSection;
pub use training::{Dataset, Dtype, TrainingSection};
pub use validation::ValidationSection;
pub use value_guard::{GuardPolicy, ValueGuardSection};

use crate::ConfigError;

/// Rejects a count below one.
fn at_least_one(key: &str, value: u64) -> Result<(), ConfigError> {
    if value >= 1 {
        return Ok(());
    }
    Err(ConfigError::contradiction(
        format!("{key} = 0 must be at least 1"),
        format!("use {key} = 1 or more"),
    ))
}

/// Rejects a number outside `low..=high`, including infinities and NaN.
pub(crate) fn within(key: &str, value: f64, low: f64, high: f64) -> Result<(), ConfigError> {
    if value.is_finite() && (low..=high).contains(&value) {
        return Ok(());
    }
    let range = if high.is_finite() {
        format!("between {low} and {high}")
    } else {
        format!("finite and at least {low}")
    };
    let remedy = if value.is_finite() {
        format!("the nearest valid choice is {}", value.clamp(low, high))
    } else {
        "choose a finite number".into()
    };
    let conflict = format!("{key} = {value} must be {range}");
    Err(ConfigError::contradiction(conflict, remedy))
}

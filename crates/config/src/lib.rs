//! The config file: keys, defaults, overrides and validation.
//!
//! A config is TOML with torchtitan's section and key names. Every key has a default; a key can be overridden as
//! `--training.steps 100`. A config that loads is consistent: unknown and contradicting keys are rejected with their
//! location, the reason and a remedy.
//!
//! Pure functions derive what the keys mean together: [`Config::mesh`] (the ranks), [`Config::batching`] (the division of
//! a batch) and [`ModelSection::resolve`] (the dimensions of the model).
//!
//! ```
//! let text = "[training]\nsteps = 20\n";
//! let config = trainyard_config::Config::parse(text, &["--debug.seed=7".into()])?;
//! assert_eq!((config.training.steps, config.debug.seed), (20, 7));
//! # Ok::<(), trainyard_config::ConfigError>(())
//! ```

mod batch;
mod check;
mod choice;
mod command_line;
mod custom_section;
mod degrees;
mod divisibility;
mod error;
mod experts;
mod ignored_keys;
mod keys;
mod load;
mod mixture;
mod names;
mod overrides;
mod rescale;
mod schema;
mod section;
mod served;
mod shrink;
mod spec;
mod suggest;

use serde::{Deserialize, Serialize};

pub use batch::Batching;
pub use choice::Choice;
pub use command_line::{split_overrides, takes_keys};
pub use custom_section::CustomSections;
pub use error::{ConfigError, Location};
pub use keys::{Key, keys};
pub use load::Setting;
pub use mixture::{MixtureEntry, is_mixture, read_mixture};
pub use names::Names;
pub use rescale::Rescaled;
pub use section::{
    ActivationCheckpointMode, ActivationCheckpointSection, AsyncMode, AttentionMask, Backend,
    BitFlip, CheckpointSection, CommSection, ContextMethod, Dataset, DebugSection, DecayType,
    Dtype, GradientCompression, GuardPolicy, JobSection, LocalUpdateMethod, LocalUpdatesSection,
    LrSchedulerSection, MetricsSection, ModelName, ModelSection, MoeSection, Offload,
    OffloadStates, OptimizerImplementation, OptimizerName, OptimizerSection, ParallelismSection,
    ParameterCompression, ParameterServerSection, PipelineReduce, ProfilingSection,
    ReshardAfterForward, ResumeChange, SelectiveOption, Staleness, TrainingSection,
    ValidationSection, ValueGuardSection,
};
pub use served::Workers;
pub use spec::ModelSpec;
pub use suggest::key_for_option;

/// One training job: one field per section of its config file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The output directory and the description of the job.
    pub job: JobSection,
    /// The model and its dimensions.
    pub model: ModelSection,
    /// Data, batch sizes, sequence length, steps and types.
    pub training: TrainingSection,
    /// The parallel strategy.
    pub parallelism: ParallelismSection,
    /// Replicas that take optimizer steps of their own.
    pub local_updates: LocalUpdatesSection,
    /// Workers that push gradients to servers.
    pub parameter_server: ParameterServerSection,
    /// The optimizer and its hyperparameters.
    pub optimizer: OptimizerSection,
    /// The schedule of the learning rate.
    pub lr_scheduler: LrSchedulerSection,
    /// Saving and resuming.
    pub checkpoint: CheckpointSection,
    /// Recomputation of activations.
    pub activation_checkpoint: ActivationCheckpointSection,
    /// What is reported while training.
    pub metrics: MetricsSection,
    /// Traces and memory reports.
    pub profiling: ProfilingSection,
    /// Evaluation on held-out data.
    pub validation: ValidationSection,
    /// What happens when values are not finite.
    pub value_guard: ValueGuardSection,
    /// Process groups and their timeouts.
    pub comm: CommSection,
    /// Seed and determinism.
    pub debug: DebugSection,
    /// The keys of components that a program registers.
    pub custom: CustomSections,
}

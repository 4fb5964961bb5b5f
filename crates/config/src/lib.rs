//! The config file: its keys, their defaults, overrides, and what is refused.
//!
//! A config is TOML with the section and key names that torchtitan's users know. Every key has a
//! default; a key can be overridden as `--training.steps 100`. A config that loads is consistent:
//! keys nobody reads and keys that contradict each other are refused, with the place, the reason
//! and what to write instead.
//!
//! What the keys mean together is answered here as well, in pure functions: [`Config::mesh`] (which
//! ranks there are), [`Config::batching`] (who computes which part of a batch) and
//! [`ModelSection::resolve`] (the model's shape).
//!
//! ```
//! let text = "[training]\nsteps = 20\n";
//! let config = trainyard_config::Config::parse(text, &["--debug.seed=7".into()])?;
//! assert_eq!((config.training.steps, config.debug.seed), (20, 7));
//! # Ok::<(), trainyard_config::ConfigError>(())
//! ```

mod batch;
mod check;
mod command_line;
mod degrees;
mod error;
mod experts;
mod gpt2;
mod hugging_face;
mod llama;
mod load;
mod mixture;
mod moe;
mod overrides;
mod refit;
mod schema;
mod section;
mod sharing;
mod shrink;
mod spec;
mod suggest;
mod without_effect;

use serde::{Deserialize, Serialize};

pub use batch::Batching;
pub use command_line::split_overrides;
pub use error::{ConfigError, Place};
pub use gpt2::Gpt2Config;
pub use llama::{LlamaConfig, RopeScaling};
pub use mixture::{Ingredient, is_mixture, read_mixture};
pub use moe::MoeConfig;
pub use refit::Refit;
pub use section::{
    ActivationCheckpointMode, ActivationCheckpointSection, AsyncMode, AttentionMask, Backend,
    CheckpointSection, CommSection, ContextMethod, Dataset, DebugSection, DecayType, Dtype, Flavor,
    GradientCompression, JobSection, LrSchedulerSection, MetricsSection, ModelName, ModelSection,
    MoeSection, Offload, OptimizerImplementation, OptimizerName, OptimizerSection,
    ParallelismSection, PipelineReduce, ProfilingSection, ReshardAfterForward, ScoringFunc,
    SelectiveOption, TrainingSection, ValidationSection,
};
pub use spec::{DecoderSizes, ModelSpec};

/// One training job, as its config file describes it: one field per section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where the job writes, and what it is called.
    pub job: JobSection,
    /// Which model, and its shape.
    pub model: ModelSection,
    /// Data, batch, length and number types of the run.
    pub training: TrainingSection,
    /// How the work is split over ranks.
    pub parallelism: ParallelismSection,
    /// The optimiser and its numbers.
    pub optimizer: OptimizerSection,
    /// How the learning rate moves.
    pub lr_scheduler: LrSchedulerSection,
    /// Saving and resuming.
    pub checkpoint: CheckpointSection,
    /// Recomputing activations instead of keeping them.
    pub activation_checkpoint: ActivationCheckpointSection,
    /// What is reported while training.
    pub metrics: MetricsSection,
    /// Traces and memory records.
    pub profiling: ProfilingSection,
    /// Evaluation on held-out data.
    pub validation: ValidationSection,
    /// Process groups and their timeouts.
    pub comm: CommSection,
    /// Seed and determinism.
    pub debug: DebugSection,
}

//! Converts strategies to and from the config formats of other training frameworks.
//!
//! Writing never drops a choice silently: if a framework cannot express a setting, the writer uses the nearest one
//! that it can express and reports the replacement as a [`Deviation`]. Reading never guesses: a setting that the
//! planner does not model is rejected, with the reason and the nearest alternative. So a strategy that was written
//! without deviations reads back unchanged.
//!
//! [`Framework::translate`] turns a config into overrides of Trainyard's, key by key, for training: every key is
//! translated, ignored with the reason, or rejected because it changes the result and has no counterpart.
//!
//! Each format is pinned to one version of the framework, whose own config code has parsed our output.
//!
//! ```
//! use trainyard_arch::{DecoderConfig, Flavor};
//! use trainyard_interop::Framework;
//!
//! let text = r#"
//! [model]
//! flavor = "llama3-8b"
//! [training]
//! seq_len = 8192
//! mixed_precision_param = "bfloat16"
//! [parallelism]
//! data_parallel_replicate_degree = 1
//! data_parallel_shard_degree = 8
//! tensor_parallel_degree = 2
//! "#;
//! let job = Framework::Trainyard.read(text)?;
//! let shape = DecoderConfig::from(Flavor::Llama3_8b);
//! let written = Framework::Megatron.write(&shape, &job.strategy, 16)?;
//! assert!(written.text.contains("--tensor-model-parallel-size 2"));
//! // Megatron keeps a bf16 copy of every weight beside the optimizer's fp32 copy: the one deviation here.
//! assert_eq!(written.deviations.len(), 1);
//! # Ok::<(), trainyard_interop::FrameworkError>(())
//! ```

mod accelerate;
mod adapt;
mod arguments;
mod canonical;
mod deepspeed;
mod detect;
mod deviation;
mod error;
mod megatron;
mod model_file;
mod shell;
mod suggest;
mod torchtitan;
mod trainyard;
mod translation;

#[cfg(test)]
mod tests;

use std::fmt;
use trainyard_arch::DecoderConfig;

use canonical::{canonical, canonical_shape, check, check_degrees, is_same_model};
pub use deviation::{Deviation, Resolution, Setting};
pub use error::FrameworkError;
pub use model_file::{ModelFileError, load_decoder, load_decoder_with};
use trainyard_plan::{Software, Strategy};
pub use translation::{Outcome, TranslateOptions, TranslatedKey, Translation};

/// What an estimate of a job with `fp16` leaves out.
const FP16_UNMODELED: &str =
    "fp16: steps that overflow, which are skipped with a smaller loss scale";

/// What an estimate of a job that offloads some states leaves out.
const OFFLOAD_UNMODELED: &str = "the planner offloads weights and states together, so this is without offloading: the \
    job needs less device memory and more time than estimated";

/// A config format of a training framework, at a pinned version.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Framework {
    /// Trainyard's TOML.
    Trainyard,
    /// The TOML of torchtitan 0.2.2, the last version with a TOML format.
    Torchtitan,
    /// The command line of torchtitan 0.3.0, which replaced the TOML.
    TorchtitanCommandLine,
    /// The command-line flags of Megatron-LM (Megatron Core 0.16.1).
    Megatron,
    /// The JSON config of DeepSpeed 0.19.8.
    DeepSpeed,
    /// The YAML config of Hugging Face's Accelerate. It is read, not written.
    Accelerate,
}

/// A strategy written in a framework's config format.
#[derive(Clone, Debug, PartialEq)]
pub struct EmittedConfig {
    /// The config file or the command line.
    pub text: String,
    /// The settings in which the config differs from the strategy.
    pub deviations: Vec<Deviation>,
}

/// A job read from a framework's config.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedJob {
    /// The model, if the config describes it.
    pub shape: Option<DecoderConfig>,
    /// The parallelism strategy, in canonical form.
    pub strategy: Strategy,
    /// The kernels and overlap that the framework uses with this config.
    pub software: Software,
    /// The world size, if the config determines it.
    pub world: Option<usize>,
    /// Settings that are not part of an estimate, and what that means.
    pub unmodeled: Vec<String>,
}

/// Values that a config may leave to the launcher or to the training script.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchInfo {
    /// The number of ranks.
    pub world: Option<usize>,
    /// The sequence length, in tokens.
    pub seq_len: Option<usize>,
    /// Keys that replace those of a Trainyard config, as in `--training.seq_len=4096`.
    pub overrides: Vec<String>,
}

impl Framework {
    /// Every format that strategies are written in.
    pub const ALL: [Framework; 5] = [
        Framework::Trainyard,
        Framework::Torchtitan,
        Framework::TorchtitanCommandLine,
        Framework::Megatron,
        Framework::DeepSpeed,
    ];

    /// The framework's name and the version it is pinned to.
    pub const fn name(self) -> &'static str {
        match self {
            Framework::Trainyard => "Trainyard",
            Framework::Torchtitan => "torchtitan 0.2.2",
            Framework::TorchtitanCommandLine => "torchtitan 0.3.0",
            Framework::Megatron => "Megatron-LM core 0.16.1",
            Framework::DeepSpeed => "DeepSpeed 0.19.8",
            Framework::Accelerate => "Accelerate",
        }
    }

    /// Whether a config of this framework can describe the model. Otherwise the training script does.
    pub const fn describes_models(self) -> bool {
        !matches!(self, Framework::DeepSpeed | Framework::Accelerate)
    }

    /// Whether [`Framework::translate`] reads this format.
    pub const fn is_translated(self) -> bool {
        !matches!(
            self,
            Framework::Trainyard | Framework::TorchtitanCommandLine
        )
    }

    /// Writes the strategy for `world` ranks in this framework's config format.
    pub fn write(
        self,
        shape: &DecoderConfig,
        strategy: &Strategy,
        world: usize,
    ) -> Result<EmittedConfig, FrameworkError> {
        check(self, Some(shape), strategy)?;
        let needed = strategy.degrees.world_size();
        if needed != world {
            return Err(self.unsupported(
                format!("{world} ranks"),
                format!("the parallel degrees multiply to {needed}"),
                format!("use {needed} ranks"),
            ));
        }
        match self {
            Framework::Trainyard => trainyard::write(shape, strategy),
            Framework::Torchtitan => torchtitan::write_toml(shape, strategy),
            Framework::TorchtitanCommandLine => torchtitan::write_command_line(shape, strategy),
            Framework::Megatron => megatron::write(shape, strategy),
            Framework::DeepSpeed => deepspeed::write(shape, strategy),
            Framework::Accelerate => Err(self.unsupported(
                "a YAML config",
                "Accelerate leaves most settings to the script",
                "write a DeepSpeed config, which `accelerate launch` takes as deepspeed_config_file",
            )),
        }
    }

    /// Reads a config of this framework. The result is in canonical form: a setting without effect, such as a
    /// schedule without a pipeline, has its default value.
    pub fn read(self, text: &str) -> Result<ParsedJob, FrameworkError> {
        self.read_with(text, &LaunchInfo::default())
    }

    /// Reads a config of this framework, with `launch` for the values that the config leaves open.
    pub fn read_with(self, text: &str, launch: &LaunchInfo) -> Result<ParsedJob, FrameworkError> {
        let read = match self {
            Framework::Trainyard => trainyard::read(text, launch),
            Framework::Torchtitan => torchtitan::read_toml(text, launch),
            Framework::TorchtitanCommandLine => torchtitan::read_command_line(text, launch),
            Framework::Megatron => megatron::read(text, launch),
            Framework::DeepSpeed => deepspeed::read(text, launch),
            Framework::Accelerate => accelerate::read(text, launch),
        }?;
        check(self, read.shape.as_ref(), &read.strategy)?;
        Ok(ParsedJob {
            shape: read.shape.as_ref().map(canonical_shape),
            strategy: canonical(&read.strategy),
            software: read.software,
            world: read.world,
            unmodeled: read.unmodeled,
        })
    }

    /// Translates a config key by key to Trainyard's. Fails only if the config is invalid: keys without a
    /// counterpart are part of the result. A Trainyard config needs no translation, and has none.
    pub fn translate(
        self,
        text: &str,
        options: &TranslateOptions,
    ) -> Result<Translation, FrameworkError> {
        match self {
            Framework::DeepSpeed => deepspeed::translate(text, options),
            Framework::Accelerate => accelerate::translate(text, options),
            Framework::Torchtitan => torchtitan::translate_toml(text, options),
            Framework::TorchtitanCommandLine => Err(self.unsupported(
                "its command line",
                "the defaults of its configs are Python code",
                "use a TOML of torchtitan 0.2.2, or write a Trainyard config with `plan --emit trainyard`",
            )),
            Framework::Megatron => megatron::translate(text, options),
            Framework::Trainyard => Ok(Translation::default()),
        }
    }

    fn unsupported(
        self,
        what: impl Into<String>,
        why: impl Into<String>,
        nearest: impl Into<String>,
    ) -> FrameworkError {
        FrameworkError::Unsupported {
            framework: self,
            what: what.into(),
            why: why.into(),
            nearest: nearest.into(),
        }
    }

    fn unspecified(self, what: &'static str, remedy: impl Into<String>) -> FrameworkError {
        FrameworkError::Unspecified {
            framework: self,
            what,
            remedy: remedy.into(),
        }
    }

    fn syntax(self, reason: impl fmt::Display) -> FrameworkError {
        FrameworkError::Syntax {
            framework: self,
            reason: reason.to_string(),
        }
    }

    /// Divides the world size by the degrees `taken`; the quotient is the data-parallel degree.
    fn left_of(self, world: Option<usize>, taken: &[usize]) -> Result<usize, FrameworkError> {
        let Some(world) = world else {
            return Err(self.unspecified(
                "the number of ranks",
                "launch it with torchrun --nproc-per-node and --nnodes, or pass the world size separately",
            ));
        };
        let product = taken.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        match product {
            Some(product) if product > 0 && world >= product && world.is_multiple_of(product) => {
                Ok(world / product)
            }
            _ => Err(self.unsupported(
                format!("{world} ranks"),
                format!("the degrees {taken:?} do not divide the number of ranks"),
                "use a multiple of the product of the degrees",
            )),
        }
    }
}

impl fmt::Display for Framework {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

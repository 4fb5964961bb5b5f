//! The same strategy in the words of other frameworks, both ways.
//!
//! Writing never drops a choice silently. What a framework cannot say is replaced by the nearest thing that
//! works, and every replacement is a [`Loss`]. Reading never guesses: a setting that means something else
//! than it seems is refused, with the reason and the nearest thing that works. So what was written without
//! loss is read back as it was.
//!
//! Every framework is pinned to the version whose own code has parsed what is written here.
//!
//! ```
//! use trainyard_config::{Flavor, LlamaConfig};
//! use trainyard_plan::{Framework, Shape};
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
//! let shape = Shape::from(&LlamaConfig::of(Flavor::Llama3_8b));
//! let written = Framework::Megatron.write(&shape, &job.strategy, 16)?;
//! assert!(written.text.contains("--tensor-model-parallel-size 2"));
//! // Megatron keeps a copy of every weight beside the optimiser's; that is told, not hidden.
//! assert_eq!(written.losses.len(), 1);
//! # Ok::<(), trainyard_plan::FrameworkError>(())
//! ```

mod arguments;
mod canonical;
mod deepspeed;
mod detect;
mod error;
mod fit;
mod loss;
mod megatron;
mod suggest;
mod torchtitan;
mod trainyard;

#[cfg(test)]
mod tests;

use std::fmt;

use crate::{Shape, Software, Strategy};
use canonical::{canonical, canonical_shape, check, check_degrees, is_same_model};
pub use error::FrameworkError;
pub use loss::{Choice, Instead, Loss};

/// A framework, and a way to tell it a strategy.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Framework {
    /// Our own TOML.
    Trainyard,
    /// torchtitan's TOML, which ended with 0.2.2.
    Torchtitan,
    /// torchtitan's command line since then: 0.3.0.
    TorchtitanCommandLine,
    /// Megatron-LM's flags, of core 0.16.1.
    Megatron,
    /// DeepSpeed's JSON, of 0.19.8.
    DeepSpeed,
}

/// A strategy in a framework's words.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// The config file or the command line.
    pub text: String,
    /// What it does not say as it was meant.
    pub losses: Vec<Loss>,
}

/// What a framework's text says.
#[derive(Clone, Debug, PartialEq)]
pub struct Read {
    /// The model, where the text has it.
    pub shape: Option<Shape>,
    /// The strategy.
    pub strategy: Strategy,
    /// What the program does that runs it so.
    pub software: Software,
    /// How many ranks the text itself says there are.
    pub world: Option<usize>,
}

/// What is known beside a text that leaves it to whoever starts the job.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// How many ranks there are.
    pub world: Option<usize>,
    /// Tokens of a sample.
    pub seq_len: Option<usize>,
}

impl Framework {
    /// All of them.
    pub const ALL: [Framework; 5] = [
        Framework::Trainyard,
        Framework::Torchtitan,
        Framework::TorchtitanCommandLine,
        Framework::Megatron,
        Framework::DeepSpeed,
    ];

    /// The name, with the version it is pinned to.
    pub const fn name(self) -> &'static str {
        match self {
            Framework::Trainyard => "Trainyard",
            Framework::Torchtitan => "torchtitan 0.2.2",
            Framework::TorchtitanCommandLine => "torchtitan 0.3.0",
            Framework::Megatron => "Megatron-LM core 0.16.1",
            Framework::DeepSpeed => "DeepSpeed 0.19.8",
        }
    }

    /// The strategy for `world` ranks in this framework's words.
    pub fn write(
        self,
        shape: &Shape,
        strategy: &Strategy,
        world: usize,
    ) -> Result<Written, FrameworkError> {
        check(self, Some(shape), strategy)?;
        let needed = strategy.degrees.world_size();
        if needed != world {
            return Err(self.refusal(
                format!("{world} ranks"),
                format!("the strategy's degrees multiply to {needed}"),
                format!("use {needed} ranks"),
            ));
        }
        match self {
            Framework::Trainyard => trainyard::write(shape, strategy),
            Framework::Torchtitan => torchtitan::write_toml(shape, strategy),
            Framework::TorchtitanCommandLine => torchtitan::write_command_line(shape, strategy),
            Framework::Megatron => megatron::write(shape, strategy),
            Framework::DeepSpeed => deepspeed::write(shape, strategy),
        }
    }

    /// What a text of this framework's says, in canonical form: choices that mean nothing beside others,
    /// such as a schedule without a pipeline, are at their plainest.
    pub fn read(self, text: &str) -> Result<Read, FrameworkError> {
        self.read_with(text, &Told::default())
    }

    /// The same with what the text leaves open.
    pub fn read_with(self, text: &str, told: &Told) -> Result<Read, FrameworkError> {
        let read = match self {
            Framework::Trainyard => trainyard::read(text, told),
            Framework::Torchtitan => torchtitan::read_toml(text, told),
            Framework::TorchtitanCommandLine => torchtitan::read_command_line(text, told),
            Framework::Megatron => megatron::read(text, told),
            Framework::DeepSpeed => deepspeed::read(text, told),
        }?;
        check(self, read.shape.as_ref(), &read.strategy)?;
        Ok(Read {
            shape: read.shape.as_ref().map(canonical_shape),
            strategy: canonical(&read.strategy),
            software: read.software,
            world: read.world,
        })
    }

    fn refusal(
        self,
        what: impl Into<String>,
        why: impl Into<String>,
        nearest: impl Into<String>,
    ) -> FrameworkError {
        FrameworkError::Refused {
            framework: self,
            what: what.into(),
            why: why.into(),
            nearest: nearest.into(),
        }
    }

    fn untold(self, what: &'static str, remedy: impl Into<String>) -> FrameworkError {
        FrameworkError::Untold {
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

    /// The data-parallel ranks that `world` leaves to the other degrees.
    fn left_of(self, world: Option<usize>, taken: &[usize]) -> Result<usize, FrameworkError> {
        let Some(world) = world else {
            return Err(self.untold(
                "how many ranks there are",
                "start it with torchrun --nproc-per-node and --nnodes, or tell the number beside it",
            ));
        };
        let product = taken.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        match product {
            Some(product) if product > 0 && world >= product && world.is_multiple_of(product) => {
                Ok(world / product)
            }
            _ => Err(self.refusal(
                format!("{world} ranks"),
                format!("the degrees {taken:?} do not divide them"),
                "use a multiple of their product",
            )),
        }
    }
}

impl fmt::Display for Framework {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

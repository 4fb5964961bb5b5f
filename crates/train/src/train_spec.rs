//! What a job trains: its config, and the program that knows what the config names.

use std::ops::Deref;
use std::path::Path;
use std::rc::Rc;

use tch::Tensor;
use trainyard_config::Config;
use trainyard_nn::{Model, Module, Parameter, Unit};

use crate::error::{Result, TrainError};
use crate::registry::{LossFn, Registry};

/// A config, with the components that a program registers. It can be used as the config that it has.
#[derive(Clone)]
pub struct TrainSpec {
    config: Config,
    registry: Rc<Registry>,
}

impl TrainSpec {
    /// A config that names components of `registry`.
    pub fn new(config: Config, registry: &Rc<Registry>) -> Result<TrainSpec> {
        registry.check(&config)?;
        if config.parallelism.auto {
            return Err(TrainError::NotPlanned);
        }
        Ok(TrainSpec {
            config,
            registry: Rc::clone(registry),
        })
    }

    /// Reads a config file, applies overrides such as `--training.steps 100`, and validates the result.
    pub fn load(
        path: impl AsRef<Path>,
        overrides: &[String],
        registry: &Rc<Registry>,
    ) -> Result<TrainSpec> {
        let config = Config::load_with(path, overrides, &registry.names())?;
        TrainSpec::new(config, registry)
    }

    /// Another config of the same program.
    pub fn with_config(&self, config: Config) -> TrainSpec {
        TrainSpec {
            config,
            registry: Rc::clone(&self.registry),
        }
    }

    /// The registered components.
    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }
}

/// A config that names components of Trainyard only.
impl From<&Config> for TrainSpec {
    fn from(config: &Config) -> Self {
        TrainSpec {
            config: config.clone(),
            registry: Rc::new(Registry::builtin()),
        }
    }
}

impl Deref for TrainSpec {
    type Target = Config;

    fn deref(&self) -> &Config {
        &self.config
    }
}

/// A model with another loss than its own.
pub(crate) struct WithLoss {
    pub model: Box<dyn Model>,
    pub loss: LossFn,
}

impl Module for WithLoss {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        self.model.visit(visitor);
    }
}

impl Model for WithLoss {
    fn units(&self) -> Vec<&dyn Unit> {
        self.model.units()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> trainyard_nn::Result<Tensor> {
        (self.loss)(output, targets)
    }

    fn layer_comm_bytes(&self, num_tokens: u64) -> Option<u64> {
        self.model.layer_comm_bytes(num_tokens)
    }
}

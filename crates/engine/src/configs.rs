//! How commands read config files: with the overrides of the command line and the components of the program.

use std::path::Path;
use std::rc::Rc;

use trainyard_train::{Registry, TrainSpec};

use crate::error::Result;

/// Reads config files for one command.
pub struct Configs {
    /// The config keys among the arguments.
    pub overrides: Vec<String>,
    /// What a config may name.
    pub registry: Rc<Registry>,
}

impl Configs {
    /// Reads a config file and applies the overrides.
    pub fn load(&self, path: &Path) -> Result<TrainSpec> {
        Ok(TrainSpec::load(path, &self.overrides, &self.registry)?)
    }

    /// Reads a config file as it is.
    pub fn load_plain(&self, path: &Path) -> Result<TrainSpec> {
        Ok(TrainSpec::load(path, &[], &self.registry)?)
    }
}

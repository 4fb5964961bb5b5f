//! `trainyard train`: one rank of a training job.

use clap::Args;

use super::{ConfigFile, auto};
use crate::engine;
use crate::failure::Failure;

/// Train a model from a config file
///
/// Trains on one rank. Start it with `trainyard run` to train on several ranks, which find each other
/// through torchrun's environment variables.
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard train CONFIG.toml [--SECTION.KEY VALUE]...",
    after_help = "Examples:\n  \
    trainyard train configs/llama-tiny.toml --training.steps 100\n  \
    trainyard run --standalone --nproc-per-node 2 -- trainyard train configs/llama-tiny.toml"
)]
pub struct Train {
    #[command(flatten)]
    config: ConfigFile,
}

impl Train {
    /// Validates the config and replaces this process by the engine.
    pub fn execute(self, overrides: &[String]) -> Failure {
        match self.config.planned(overrides, auto::world_size()) {
            Ok(chosen) => engine::hand_over_with(&chosen),
            Err(failure) => failure,
        }
    }
}

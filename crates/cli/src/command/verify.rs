//! `trainyard verify`: does the split compute the same thing?

use clap::Args;

use super::ConfigFile;
use crate::engine;
use crate::failure::Failure;

/// Compare a config's strategy on N local ranks with the same config on one
///
/// Losses, gradient norms and every parameter, in fp64 and in the config's own type, and the bytes
/// sent against the closed form. Exits with 1 when something differs.
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard verify CONFIG.toml --nproc N [--steps N] [--json] [--shrink] [--SECTION.KEY VALUE]...",
    after_help = "Examples:\n  \
    trainyard verify configs/llama-tiny.toml --nproc 2\n  \
    trainyard verify configs/llama3-70b.toml --nproc 4 --shrink --json"
)]
pub struct Verify {
    #[command(flatten)]
    config: ConfigFile,
    /// How many local ranks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    nproc: u64,
    /// Steps to compare
    #[arg(long, value_name = "N", default_value_t = 5)]
    steps: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Verify a copy of the config scaled down to fit this machine
    #[arg(long)]
    shrink: bool,
    /// Break the strategy on purpose, to see that it is noticed: `unreduced-gradient`
    #[arg(long, hide = true)]
    sabotage: Option<String>,
}

impl Verify {
    /// Checks the config and becomes the engine.
    pub fn execute(self, overrides: &[String]) -> Failure {
        self.config
            .check(overrides)
            .err()
            .unwrap_or_else(engine::hand_over)
    }
}

//! `trainyard verify`: proves that a strategy equals one rank.

use clap::Args;

use super::ConfigFile;
use crate::engine;
use crate::failure::Failure;

/// Compare a strategy on N local ranks with the same config on one rank
///
/// Compares losses, gradient norms and every parameter, in fp64 and in the config's own type, and the
/// bytes sent with the closed form. Exits with 1 if anything differs.
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard verify CONFIG.toml --nproc N [--servers N [--nproc-per-worker N]] [--steps N] [--json] [--shrink] [--SECTION.KEY VALUE]...",
    after_help = "Examples:\n  \
    trainyard verify configs/llama-tiny.toml --nproc 2\n  \
    trainyard verify configs/llama-tiny.toml --nproc 2 --servers 1 --parameter_server.staleness 0\n  \
    trainyard verify configs/llama3-70b.toml --nproc 4 --shrink --json"
)]
pub struct Verify {
    #[command(flatten)]
    config: ConfigFile,
    /// Number of local ranks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    nproc: u64,
    /// Compare this many parameter servers, with the ranks as their workers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    servers: Option<u64>,
    /// Ranks of each worker
    #[arg(long, value_name = "N", requires = "servers", value_parser = clap::value_parser!(u64).range(1..))]
    nproc_per_worker: Option<u64>,
    /// Steps to compare
    #[arg(long, value_name = "N", default_value_t = 5)]
    steps: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Verify a scaled-down copy of the config
    #[arg(long)]
    shrink: bool,
    /// Break the strategy on purpose, to test the verification: `unreduced-gradient`
    #[arg(long, hide = true)]
    inject_fault: Option<String>,
}

impl Verify {
    /// Validates the config and replaces this process by the engine.
    pub fn execute(self, overrides: &[String]) -> Failure {
        self.config
            .check(overrides)
            .err()
            .unwrap_or_else(engine::hand_over)
    }
}

//! `trainyard bench`: what this machine and its network can do.

use clap::{Args, Subcommand};

use crate::engine;
use crate::failure::Failure;

/// Measure what this machine can do
#[derive(Debug, Args)]
pub struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Comm(Comm),
    Operators(Operators),
}

/// Time every operator of a config's model, with as many ranks at work, as lines of JSON
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard bench operators CONFIG.toml --nproc N [--steps N] [--SECTION.KEY VALUE]...",
    after_help = "Example:\n  trainyard bench operators configs/llama-small.toml --nproc 2"
)]
struct Operators {
    /// The config; every rank trains its model alone
    #[arg(value_name = "CONFIG.toml")]
    config: std::path::PathBuf,
    /// How many local ranks
    #[arg(long, value_name = "N", default_value_t = 2)]
    nproc: usize,
    /// Steps to time at each size
    #[arg(long, value_name = "N", default_value_t = 4)]
    steps: usize,
}

/// Time every collective by size, as nccl-tests does: size, time, algbw, busbw
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard bench comm --nproc N [OPTIONS]...",
    after_help = "Example:\n  trainyard bench comm --nproc 2"
)]
struct Comm {
    /// How many local ranks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    nproc: Option<u64>,
    /// All options go to the engine as they are
    #[arg(value_name = "MORE", allow_hyphen_values = true)]
    options: Vec<String>,
}

impl Bench {
    /// Becomes the engine.
    pub fn execute(self) -> Failure {
        engine::hand_over()
    }
}

//! `trainyard bench`: measurements of this node.

use clap::{Args, Subcommand};

use crate::engine;
use crate::failure::Failure;

/// Measure operators and collectives on this node
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

/// Time every operator of a model while N ranks are busy; prints JSON lines
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard bench operators CONFIG.toml --nproc N [--steps N] [--SECTION.KEY VALUE]...",
    after_help = "Example:\n  trainyard bench operators configs/llama-small.toml --nproc 2"
)]
struct Operators {
    /// The config; every rank trains its model without communication
    #[arg(value_name = "CONFIG.toml")]
    config: std::path::PathBuf,
    /// Number of local ranks
    #[arg(long, value_name = "N", default_value_t = 2)]
    nproc: usize,
    /// Steps to time per size
    #[arg(long, value_name = "N", default_value_t = 4)]
    steps: usize,
}

/// Time every collective by size, with the columns of nccl-tests: size, time, algbw, busbw
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard bench comm --nproc N [OPTIONS]...",
    after_help = "Example:\n  trainyard bench comm --nproc 2"
)]
struct Comm {
    /// Number of local ranks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    nproc: Option<u64>,
    /// Options of the engine
    #[arg(value_name = "MORE", allow_hyphen_values = true)]
    options: Vec<String>,
}

impl Bench {
    /// Replaces this process by the engine.
    pub fn execute(self) -> Failure {
        engine::hand_over()
    }
}

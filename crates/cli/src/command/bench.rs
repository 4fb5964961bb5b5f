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
#[command(after_help = "Examples:\n  \
    trainyard bench comm --nproc 2\n  \
    trainyard bench comm --nproc 4 --ops all_reduce,all_gather --min-bytes 1048576 --json")]
struct Comm {
    /// Number of local ranks
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(2..))]
    nproc: u64,
    /// Collectives, separated by commas; all by default
    #[arg(long, value_name = "OPS", value_delimiter = ',', value_parser = OPS)]
    ops: Vec<String>,
    /// Smallest size in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 10)]
    min_bytes: usize,
    /// Largest size in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    max_bytes: usize,
    /// Factor between consecutive sizes
    #[arg(long, value_name = "N", default_value_t = 4)]
    factor: usize,
    /// Matrix products that every rank computes before each call, separated by commas. With 1 or more, the time of a
    /// call is what it adds to them, including cold caches and the wait for the slowest rank
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "0")]
    work: Vec<usize>,
    /// Seconds to spend on each size
    #[arg(long, value_name = "SECONDS", default_value_t = 0.3)]
    seconds: f64,
    /// Send over loopback, as to another node, instead of sharing memory
    #[arg(long)]
    no_shared_memory: bool,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

/// The collectives that can be measured.
const OPS: [&str; 10] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send_recv",
    "barrier",
];

impl Bench {
    /// Replaces this process by the engine.
    pub fn execute(self) -> Failure {
        engine::hand_over()
    }
}

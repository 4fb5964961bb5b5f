//! `trainyard dry-run`: one rank of a job of any size, on meta tensors.

use std::ffi::OsString;

use clap::Args;

use super::ConfigFile;
use super::simulate::{self, SimulatedGpus};
use crate::engine;
use crate::failure::Failure;

/// Run one step of one rank on meta tensors with a fake process group
///
/// Executes the training code itself and counts parameters, peak memory by kind, collectives with
/// their bytes, and FLOPs. A model for 1024 ranks fits on a laptop.
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard dry-run CONFIG.toml --world N [--rank R | --servers N [--nproc-per-worker N]] [--allocator cuda,expandable] [--json [--operators]] [--SECTION.KEY VALUE]...",
    after_help = "Example:\n  \
    trainyard dry-run configs/llama3-70b.toml --world 1024 --rank 0 --json\n  \
    trainyard dry-run configs/llama3-8b.toml --world 8 --allocator cuda,expandable\n  \
    trainyard dry-run configs/llama-tiny.toml --world 4 --servers 2"
)]
pub struct DryRun {
    #[command(flatten)]
    config: ConfigFile,
    /// Number of ranks of the job
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    world: u64,
    /// The rank to run
    #[arg(long, value_name = "R", default_value_t = 0)]
    rank: u64,
    /// Run a worker and one of this many parameter servers; the ranks are workers
    #[arg(long, value_name = "N", conflicts_with_all = ["rank", "allocator"], value_parser = clap::value_parser!(u64).range(1..))]
    servers: Option<u64>,
    /// Ranks of each worker
    #[arg(long, value_name = "N", requires = "servers", value_parser = clap::value_parser!(u64).range(1..))]
    nproc_per_worker: Option<u64>,
    /// Also measure the memory of CUDA's caching allocator, on a simulated GPU: `cuda` for its default settings,
    /// `expandable` for expandable_segments:True
    #[arg(long, value_delimiter = ',', value_name = "SETTINGS", value_parser = ALLOCATORS)]
    allocator: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Include every operator call in the JSON, by name and size
    #[arg(long, requires = "json", conflicts_with = "servers")]
    operators: bool,
}

/// The settings of CUDA's caching allocator that can be measured.
pub const ALLOCATORS: [&str; 2] = ["cuda", "expandable"];

/// Far more memory than any GPU has, to measure how much a job takes.
pub const UNLIMITED: u64 = 4096 << 30;

/// The environment of an engine that measures allocators, on a GPU with so much memory.
pub fn simulated_gpu(memory_bytes: u64) -> Result<Vec<(&'static str, OsString)>, Failure> {
    simulate::environment(&SimulatedGpus {
        gpus: 1,
        arch: "80",
        memory_bytes,
    })
}

impl DryRun {
    /// Validates the arguments and replaces this process by the engine.
    pub fn execute(self, overrides: &[String]) -> Failure {
        let (rank, world) = (self.rank, self.world);
        if rank >= world {
            return Failure::usage(format!("--rank {rank} is not in a world of {world}"))
                .hint(format!("ranks are numbered from 0 to {}", world - 1));
        }
        match self.config.planned(overrides, world as usize) {
            Ok(chosen) if self.allocator.is_empty() => engine::hand_over_with(&chosen),
            Ok(chosen) => match simulated_gpu(UNLIMITED) {
                Ok(environment) => engine::hand_over_in(environment, &chosen),
                Err(failure) => failure,
            },
            Err(failure) => failure,
        }
    }
}

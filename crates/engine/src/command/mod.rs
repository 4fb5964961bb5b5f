//! The commands of the engine, one module each.

pub mod allocator;
mod bench_checkpoint;
mod bench_comm;
mod bench_operators;
mod bench_step;
mod check_backend;
mod dry_run;
mod fitting_gpus;
mod plan;
mod train;
mod verify;

use std::process::ExitCode;

use clap::Subcommand;

use crate::configs::Configs;
use crate::error::Result;

/// The command to run. Its arguments are those of `trainyard`, which has checked them.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train the model of a config file
    ///
    /// A single process trains on one rank. To train on several, start it with `trainyard run` (or torchrun),
    /// which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Every key of the config file can be
    /// overridden on the command line. With `checkpoint.enable` a job resumes from its latest checkpoint, and
    /// on SIGTERM it saves one before it exits.
    Train(train::Arguments),
    /// Simulate one rank on meta tensors: peak memory, FLOPs and communication of a step
    DryRun(dry_run::Arguments),
    /// Find the fastest way to train a model on a cluster, by dry runs of its training code
    Plan(Box<plan::Arguments>),
    /// The memory of one rank, as the caching allocator of this process counts it
    #[command(hide = true)]
    DryRunAllocator(allocator::Arguments),
    /// Verify that a parallel strategy computes the same as one rank
    Verify(verify::Arguments),
    /// One rank of `verify`
    #[command(hide = true)]
    VerifyRank(verify::RankArguments),
    /// Run a benchmark
    #[command(subcommand)]
    Bench(Bench),
    /// One rank of `bench comm`
    #[command(hide = true)]
    BenchCommRank(bench_comm::RankArguments),
    /// One rank of `bench operators`
    #[command(hide = true)]
    BenchOperatorsRank(bench_operators::RankArguments),
    /// Train a preset and report throughput, memory and losses in the format of `bench/peers`
    #[command(hide = true)]
    BenchStep(bench_step::Arguments),
    /// Save and load checkpoints of a preset and report times in the format of `bench/peers`
    #[command(hide = true)]
    BenchCheckpoint(bench_checkpoint::Arguments),
    /// Check whether a communication backend is available on this host
    #[command(hide = true)]
    CheckBackend(check_backend::Arguments),
}

/// The available benchmarks.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Latency and bandwidth of collectives, as nccl-tests reports them
    Comm(bench_comm::Arguments),
    /// Time of every operator of a model
    Operators(bench_operators::Arguments),
}

impl Command {
    /// Runs the command.
    pub fn execute(self, configs: &Configs) -> Result<ExitCode> {
        match self {
            Command::Train(arguments) => train::execute(arguments, configs),
            Command::DryRun(arguments) => dry_run::execute(arguments, configs),
            Command::Plan(arguments) => plan::execute(*arguments, configs),
            Command::DryRunAllocator(arguments) => allocator::execute(arguments, configs),
            Command::Verify(arguments) => verify::execute(arguments, configs),
            Command::VerifyRank(arguments) => verify::execute_rank(arguments, configs),
            Command::Bench(Bench::Comm(arguments)) => bench_comm::execute(arguments),
            Command::BenchCommRank(arguments) => bench_comm::execute_rank(arguments),
            Command::Bench(Bench::Operators(arguments)) => {
                bench_operators::execute(arguments, &configs.overrides)
            }
            Command::BenchOperatorsRank(arguments) => {
                bench_operators::execute_rank(arguments, configs)
            }
            Command::BenchStep(arguments) => bench_step::execute(arguments),
            Command::BenchCheckpoint(arguments) => bench_checkpoint::execute(arguments),
            Command::CheckBackend(arguments) => check_backend::execute(arguments),
        }
    }
}

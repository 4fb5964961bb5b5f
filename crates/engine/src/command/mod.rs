//! One file per command.

mod bench_checkpoint;
mod bench_comm;
mod bench_operators;
mod bench_step;
mod check_backend;
mod dry_run;
mod train;
mod verify;

use std::process::ExitCode;

use clap::Subcommand;

use crate::error::Result;

/// What to do. Arguments are those of `trainyard`, which checked them first.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Trains as a config says.
    Train(train::Arguments),
    /// Follows one rank of any world on tensors without memory.
    DryRun(dry_run::Arguments),
    /// Shows that a config's strategy equals one rank.
    Verify(verify::Arguments),
    /// One rank of `verify`.
    #[command(hide = true)]
    VerifyRank(verify::RankArguments),
    /// Measures.
    #[command(subcommand)]
    Bench(Bench),
    /// One rank of `bench comm`.
    #[command(hide = true)]
    BenchCommRank(bench_comm::RankArguments),
    /// One rank of `bench operators`.
    #[command(hide = true)]
    BenchOperatorsRank(bench_operators::RankArguments),
    /// Trains a preset and reports speed, memory and losses as `bench/peers` do.
    #[command(hide = true)]
    BenchStep(bench_step::Arguments),
    /// Saves and loads a preset's state and reports how long that took, as `bench/peers` do.
    #[command(hide = true)]
    BenchCheckpoint(bench_checkpoint::Arguments),
    /// Says whether a backend can be used here.
    #[command(hide = true)]
    CheckBackend(check_backend::Arguments),
}

/// What can be measured.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Latency and bandwidth of every collective.
    Comm(bench_comm::Arguments),
    /// What every operator of a config's model costs.
    Operators(bench_operators::Arguments),
}

impl Command {
    /// Carries it out; `overrides` are the config keys among the arguments.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode> {
        match self {
            Command::Train(arguments) => train::execute(arguments, overrides),
            Command::DryRun(arguments) => dry_run::execute(arguments, overrides),
            Command::Verify(arguments) => verify::execute(arguments, overrides),
            Command::VerifyRank(arguments) => verify::execute_rank(arguments),
            Command::Bench(Bench::Comm(arguments)) => bench_comm::execute(arguments),
            Command::BenchCommRank(arguments) => bench_comm::execute_rank(arguments),
            Command::Bench(Bench::Operators(arguments)) => {
                bench_operators::execute(arguments, overrides)
            }
            Command::BenchOperatorsRank(arguments) => {
                bench_operators::execute_rank(arguments, overrides)
            }
            Command::BenchStep(arguments) => bench_step::execute(arguments),
            Command::BenchCheckpoint(arguments) => bench_checkpoint::execute(arguments),
            Command::CheckBackend(arguments) => check_backend::execute(arguments),
        }
    }
}

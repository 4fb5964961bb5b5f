//! The commands, one per file.

mod auto;
mod bench;
mod ckpt;
mod data;
mod dry_run;
mod elastic;
mod holder;
mod holding;
mod mesh;
mod plan;
mod rdzv;
mod rdzv_conf;
mod rendezvous;
mod run;
mod schedule;
mod top;
mod torchrun;
mod trace;
mod train;
mod verify;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use trainyard_config::Config;

use crate::failure::Failure;

/// What can be asked for.
#[derive(Debug, Subcommand)]
pub enum Command {
    Run(Box<run::Run>),
    Holder(holder::Holder),
    Rendezvous(rendezvous::Rendezvous),
    Train(train::Train),
    DryRun(dry_run::DryRun),
    Mesh(mesh::Mesh),
    Verify(verify::Verify),
    Top(top::Top),
    Trace(trace::Trace),
    Schedule(schedule::Schedule),
    Plan(Box<plan::Plan>),
    Ckpt(ckpt::Ckpt),
    Data(data::Data),
    Bench(bench::Bench),
}

impl Command {
    /// Does it, with the config's keys changed as the overrides say.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode, Failure> {
        match self {
            Command::Run(run) => run.execute(),
            Command::Holder(holder) => holder.execute(),
            Command::Rendezvous(rendezvous) => rendezvous.execute(),
            Command::Train(train) => Err(train.execute(overrides)),
            Command::DryRun(dry_run) => Err(dry_run.execute(overrides)),
            Command::Mesh(mesh) => mesh.execute(overrides),
            Command::Verify(verify) => Err(verify.execute(overrides)),
            Command::Top(top) => top.execute(),
            Command::Trace(trace) => trace.execute(),
            Command::Schedule(schedule) => schedule.execute(),
            Command::Plan(plan) => plan.execute(overrides),
            Command::Ckpt(ckpt) => ckpt.execute(),
            Command::Data(data) => data.execute(),
            Command::Bench(bench) => Err(bench.execute()),
        }
    }
}

/// A config file.
#[derive(Debug, Args)]
struct ConfigFile {
    /// The config file; every key can be changed as in `--training.steps 100`
    #[arg(value_name = "CONFIG.toml")]
    config: PathBuf,
}

impl ConfigFile {
    /// Refuses a bad config here, in milliseconds, rather than in every rank's engine.
    fn check(&self, overrides: &[String]) -> Result<(), Failure> {
        self.load(overrides).map(drop)
    }

    fn load(&self, overrides: &[String]) -> Result<Config, Failure> {
        Config::load(&self.config, overrides).map_err(Failure::new)
    }

    /// The same, and the arguments in which the planner says what the config leaves to it.
    fn planned(&self, overrides: &[String], world: usize) -> Result<Vec<String>, Failure> {
        auto::choice(&self.load(overrides)?, world)
    }
}

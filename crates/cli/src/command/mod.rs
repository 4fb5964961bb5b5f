//! The commands, one per file.

mod auto;
mod bench;
mod ckpt;
mod completions;
mod config;
mod data;
mod dry_run;
mod elastic;
mod example_configs;
mod foreign;
mod job_ranks;
mod man;
mod mesh;
mod new;
mod plan;
mod python;
mod rdzv;
mod rdzv_conf;
mod rendezvous;
mod replica_args;
mod replica_server;
mod run;
mod schedule;
mod server_args;
mod simulate;
mod telemetry_args;
mod top;
mod torchrun;
mod trace;
mod train;
mod ui;
mod verify;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;

pub use torchrun::with_spellings as with_torchrun_spellings;

use clap::{Args, Subcommand};
use trainyard_config::{Config, ConfigError, Names};

use crate::engine;
use crate::failure::Failure;

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    Run(Box<run::Run>),
    ReplicaServer(replica_server::ReplicaServer),
    Rendezvous(rendezvous::Rendezvous),
    Train(train::Train),
    Config(config::ShowConfig),
    New(new::New),
    DryRun(dry_run::DryRun),
    Mesh(mesh::Mesh),
    Verify(verify::Verify),
    Top(top::Top),
    Ui(ui::Ui),
    Trace(trace::Trace),
    Schedule(schedule::ScheduleArgs),
    Plan(Box<plan::Plan>),
    Simulate(simulate::Simulate),
    Ckpt(ckpt::Ckpt),
    Data(data::Data),
    Bench(bench::Bench),
    Completions(completions::Completions),
    Man(man::Man),
}

/// Adds what only readers of help see, and what every start would otherwise compute.
pub fn with_long_help(grammar: clap::Command) -> clap::Command {
    grammar.mut_subcommand("train", |train| {
        train.after_long_help(train::long_help_end())
    })
}

impl Command {
    /// Runs the command with config overrides.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode, Failure> {
        match self {
            Command::Run(run) => run.execute(),
            Command::ReplicaServer(server) => server.execute(),
            Command::Rendezvous(rendezvous) => rendezvous.execute(),
            Command::Train(train) => train.execute(overrides),
            Command::Config(config) => config.execute(overrides),
            Command::New(new) => new.execute(),
            Command::DryRun(dry_run) => Err(dry_run.execute(overrides)),
            Command::Mesh(mesh) => mesh.execute(overrides),
            Command::Verify(verify) => Err(verify.execute(overrides)),
            Command::Top(top) => top.execute(),
            Command::Ui(ui) => ui.execute(),
            Command::Trace(trace) => trace.execute(),
            Command::Schedule(schedule) => schedule.execute(),
            Command::Plan(plan) => plan.execute(overrides),
            Command::Simulate(simulate) => Err(simulate.execute()),
            Command::Ckpt(ckpt) => ckpt.execute(),
            Command::Data(data) => data.execute(),
            Command::Bench(bench) => Err(bench.execute()),
            Command::Completions(completions) => completions.execute(),
            Command::Man(man) => man.execute(),
        }
    }
}

/// The config file argument.
#[derive(Debug, Args)]
struct ConfigFile {
    /// The config file; any key can be overridden as in `--training.steps 100`
    #[arg(value_name = "CONFIG.toml")]
    config: PathBuf,
}

impl ConfigFile {
    /// Rejects an invalid config here, in milliseconds, before any engine starts.
    fn check(&self, overrides: &[String]) -> Result<(), Failure> {
        self.load(overrides).map(drop)
    }

    fn load(&self, overrides: &[String]) -> Result<Config, Failure> {
        Config::load_with(&self.config, overrides, &names()).map_err(|error| match error {
            ConfigError::Value { ref key, .. } if Names::may_register(key) => {
                Failure::new(error).hint(
                    "a component of your own is known to your program only: run that, or set TRAINYARD_ENGINE to it",
                )
            }
            error => Failure::new(error),
        })
    }

    /// The same, with the overrides that the planner chose for `parallelism = "auto"`.
    fn planned(&self, overrides: &[String], world: usize) -> Result<Vec<String>, Failure> {
        auto::choice(&self.load(overrides)?, world)
    }
}

/// The names that a config may use: any, if it is for an engine of the user's own.
fn names() -> Names {
    if engine::is_named() {
        Names::any()
    } else {
        Names::builtin()
    }
}

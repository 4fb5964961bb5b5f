//! `trainyard train`: one rank of a training job.

use std::path::PathBuf;
use std::process::ExitCode;

use trainyard_config::Config;
use trainyard_launcher::{MAX_WORLD_SIZE, MIN_WORLD_SIZE};
use trainyard_trace::Ledger;
use trainyard_train::TrainSpec;

use crate::configs::Configs;
use crate::error::Result;
use crate::ranks::join;
use crate::served::{self, Part, Server};

/// Arguments of `train`; overrides of config keys have been split off.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "trainyard train CONFIG.toml [--SECTION.KEY VALUE]...",
    after_help = "Examples:\n  \
    trainyard train configs/llama-tiny.toml --training.steps 100\n  \
    trainyard run --standalone --nproc-per-node 2 -- trainyard train configs/llama-tiny.toml\n  \
    trainyard train configs/llama-tiny.toml --checkpoint.enable true --checkpoint.interval 50"
)]
pub struct Arguments {
    /// Path of the config file (TOML)
    #[arg(value_name = "CONFIG.toml")]
    config: PathBuf,
}

/// Joins the other ranks and runs the training job.
pub fn execute(arguments: Arguments, configs: &Configs) -> Result<ExitCode> {
    let spec = configs.load(&arguments.config)?;
    match Part::from_environment(&spec)? {
        None => run(&spec.with_config(fitted(&spec)?))?,
        Some(Part::Server(server)) => serve(&spec, &server)?,
        Some(Part::Worker { servers }) => drop(served::work(&spec, &servers, ledger_of(&spec))?),
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs this rank of a job whose ranks exchange gradients.
fn run(spec: &TrainSpec) -> Result<()> {
    let world = join(spec, ledger_of(spec))?;
    Ok(trainyard_train::job::run(spec, &world)?)
}

/// Runs a parameter server.
fn serve(run: &TrainSpec, server: &Server) -> Result<()> {
    let world = join(&server.spec, ledger_of(run))?;
    let service = server.service(run);
    Ok(trainyard_train::job::serve(&server.spec, &world, service)?)
}

fn ledger_of(spec: &TrainSpec) -> fn(usize) -> Ledger {
    if spec.profiling.enable_profiling {
        Ledger::recording
    } else {
        Ledger::new
    }
}

/// Adapts the config of an elastic job to the current number of ranks.
fn fitted(config: &Config) -> Result<Config> {
    let (Some(full), Some(num_ranks)) = (number(MAX_WORLD_SIZE), number("WORLD_SIZE")) else {
        return Ok(config.clone());
    };
    let rescaled = config.rescale(num_ranks, full)?;
    if number("RANK") == Some(0) {
        tracing::info!("{}", rescaled.reason);
        if let Some(elasticity_warning) =
            config.elasticity_warning(&possible_sizes(num_ranks, full), full)
        {
            tracing::warn!("{elasticity_warning}");
        }
    }
    Ok(rescaled.config)
}

/// The world sizes that an elastic job may have, as nodes join and leave.
fn possible_sizes(num_ranks: usize, full: usize) -> Vec<usize> {
    let min = number(MIN_WORLD_SIZE).unwrap_or(num_ranks);
    let ranks_per_node = number("LOCAL_WORLD_SIZE").unwrap_or(1).max(1);
    (min..=full).step_by(ranks_per_node).collect()
}

fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}

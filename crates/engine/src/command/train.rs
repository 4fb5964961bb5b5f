//! `trainyard train`: one rank of a training job.

use std::path::PathBuf;
use std::process::ExitCode;

use trainyard_config::Config;
use trainyard_launcher::{MAX_WORLD_SIZE, MIN_WORLD_SIZE};
use trainyard_torch::World;
use trainyard_trace::Ledger;
use trainyard_train::parameter_server::{self, Role, Service};
use trainyard_train::{TrainError, TrainSpec};

use crate::configs::Configs;
use crate::error::Result;
use crate::ranks::join;

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
    match parameter_server::role()? {
        Some(role) => run_served(&spec, role),
        None => run(&spec.with_config(fitted(&spec)?)),
    }
}

/// Runs this rank of a job whose ranks exchange gradients.
fn run(spec: &TrainSpec) -> Result<ExitCode> {
    trainyard_train::job::run(spec, &join_world(spec)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs a parameter server, or a worker of one.
fn run_served(spec: &TrainSpec, role: Role) -> Result<ExitCode> {
    let num_ranks = number("WORLD_SIZE").unwrap_or(1);
    match role {
        Role::Server {
            address,
            num_workers,
        } => {
            let config = spec.for_servers(num_ranks, num_workers);
            let server = spec.with_config(config.map_err(TrainError::from)?);
            let service = Service {
                run: spec,
                address: &address,
                num_workers,
            };
            trainyard_train::job::serve(&server, &join_world(&server)?, service)?;
        }
        Role::Worker { servers } => {
            let config = spec.for_worker(spec.training.local_batch_size);
            let worker = spec.with_config(config.map_err(TrainError::from)?);
            parameter_server::work(spec, &join_world(&worker)?, &servers)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn join_world(spec: &TrainSpec) -> Result<World> {
    let ledger = if spec.profiling.enable_profiling {
        Ledger::recording
    } else {
        Ledger::new
    };
    join(spec, ledger)
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

//! `trainyard train`: the job a config describes, on this rank.

use std::path::PathBuf;
use std::process::ExitCode;

use trainyard_config::{Backend, Config};
use trainyard_elastic::{FULL_WORLD_SIZE, LEAST_WORLD_SIZE};
use trainyard_nn::Place;
use trainyard_trace::Ledger;

use crate::error::Result;
use crate::ranks::join;

/// Arguments of `train`; keys of the config may stand among them.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The config file.
    config: PathBuf,
}

/// Joins the other ranks and trains to the end.
pub fn execute(arguments: Arguments, overrides: &[String]) -> Result<ExitCode> {
    let config = fitted(Config::load(&arguments.config, overrides)?)?;
    let ledger = match config.profiling.enable_profiling {
        true => Ledger::recording,
        false => Ledger::new,
    };
    let world = join(&config, ledger)?;
    let place = match config.comm.backend {
        Backend::Nccl => Place::Cuda(local_rank()),
        Backend::Gloo | Backend::Fake => Place::Cpu,
    };
    trainyard_train::job::run(&config, &world, place)?;
    Ok(ExitCode::SUCCESS)
}

/// Where machines come and go, the same job on as many ranks as there are.
fn fitted(config: Config) -> Result<Config> {
    let (Some(full), Some(num_ranks)) = (number(FULL_WORLD_SIZE), number("WORLD_SIZE")) else {
        return Ok(config);
    };
    let refit = config.refit(num_ranks, full)?;
    if number("RANK") == Some(0) {
        tracing::info!("{}", refit.reason);
        if let Some(misfit) = config.misfit(&possible_sizes(num_ranks, full), full) {
            tracing::warn!("{misfit}");
        }
    }
    Ok(refit.config)
}

/// How many ranks this run may have, as machines come and go.
fn possible_sizes(num_ranks: usize, full: usize) -> Vec<usize> {
    let least = number(LEAST_WORLD_SIZE).unwrap_or(num_ranks);
    let per_machine = number("LOCAL_WORLD_SIZE").unwrap_or(1).max(1);
    (least..=full).step_by(per_machine).collect()
}

fn local_rank() -> usize {
    number("LOCAL_RANK").unwrap_or(0)
}

fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}

//! `trainyard train`: the job a config describes, on this rank.

use std::path::PathBuf;
use std::process::ExitCode;

use trainyard_config::{Backend, Config};
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
    let config = Config::load(&arguments.config, overrides)?;
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

fn local_rank() -> usize {
    let given = std::env::var("LOCAL_RANK").ok();
    given.and_then(|rank| rank.parse().ok()).unwrap_or(0)
}

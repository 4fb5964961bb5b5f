//! Asynchronous data parallelism: servers hold parameters and optimizer states, workers compute gradients.
//!
//! The servers run the training loop of every other job ([`job`](crate::job)): they shard the states over each other, save
//! checkpoints, validate and report. Only the gradients of their steps come from workers. A worker runs
//! a loop of its own ([`work`]): it pulls parameters, computes the gradients of some micro-batches, and pushes them.

mod connection;
mod gradient_server;
mod shards;
mod worker;

use std::path::PathBuf;

use trainyard_checkpoint::Digest;
use trainyard_config::{CommSection, Config};
use trainyard_peer_checkpoint::SECRET_FILE;
use trainyard_tls::RunSecret;

pub use trainyard_param_server::Role;

use crate::error::{Result, TrainError};
pub(crate) use gradient_server::GradientServer;
pub use worker::work;

/// The role that the launcher has given to this process; `None` in a run without parameter servers.
pub fn role() -> Result<Option<Role>> {
    let role = Role::from_environment(|name| std::env::var(name).ok());
    role.map_err(|error| TrainError::ParameterServer(error.to_string()))
}

/// The secret that servers and workers of a run share.
fn run_secret() -> Result<RunSecret> {
    let path = std::env::var_os(SECRET_FILE).map(PathBuf::from);
    let path =
        path.ok_or_else(|| TrainError::ParameterServer(format!("{SECRET_FILE} is missing")))?;
    RunSecret::read(&path).map_err(|error| TrainError::ParameterServer(error.to_string()))
}

/// What servers and workers must have in common: everything but communication, the division of the model, and the global batch size, which
/// servers tell workers.
fn digest(config: &Config) -> Result<String> {
    let mut config = config.clone();
    config.parallelism.data_parallel_shard_degree = 1;
    config.parallelism.zero_stage = 3;
    config.training.global_batch_size = None;
    config.comm = CommSection::default();
    let text = config.to_toml()?;
    Ok(Digest::of(text.as_bytes()).to_string())
}

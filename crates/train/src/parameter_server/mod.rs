//! Asynchronous data parallelism: servers hold parameters and optimizer states, workers compute gradients.
//!
//! The servers run the training loop of every other job ([`job`](crate::job)): they shard the states over each other, save
//! checkpoints, validate and report. Only the gradients of their steps come from workers. A worker runs
//! a loop of its own ([`work`]): it pulls parameters, computes the gradients of some micro-batches, and pushes them.
//!
//! With `[local_updates]`, a worker is a replica that takes some steps of its own and pushes how far it has moved, and a step of
//! the servers is an outer step. Replicas come and go without a restart of the others. A replica may be a mesh of ranks, of which
//! the first one exchanges parameters with the servers.

mod connection;
mod dry_run;
mod exchanged_bytes;
mod gradient_server;
mod local_steps;
mod piece_samples;
mod replica;
mod shards;
mod transfers;
mod worker;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use trainyard_checkpoint::Digest;
use trainyard_config::{CommSection, Config, Workers};
use trainyard_peer_checkpoint::SECRET_FILE;
use trainyard_tls::RunSecret;
use trainyard_torch::World;

use trainyard_param_server::Progress;
pub use trainyard_param_server::Role;

use crate::error::{Result, TrainError};
use crate::trainer::{StepOutcome, Trainer};
pub use dry_run::{ServedDryRun, dry_run};
pub use exchanged_bytes::{ExchangedBytes, exchanged_bytes};
pub(crate) use gradient_server::GradientServer;
pub use worker::work;

/// What servers serve, and where.
#[derive(Clone, Copy)]
pub struct Service<'a> {
    /// The config of the run, from which those of servers and workers follow.
    pub run: &'a Config,
    /// The address that this server listens on.
    pub address: &'a str,
    /// The workers at the start.
    pub workers: Workers,
}

impl Service<'_> {
    /// The steps of a worker in one step of the servers.
    pub fn sync_steps(&self) -> u64 {
        if self.run.has_local_updates() {
            self.run.local_updates.sync_steps
        } else {
            1
        }
    }
}

/// What a checkpoint of servers says of their work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServedState {
    /// The steps of a worker in one step of the servers.
    pub sync_steps: u64,
    /// Which gradients of later steps have been applied.
    pub progress: Progress,
}

impl ServedState {
    /// Rejects a checkpoint that counts other steps than this job.
    pub(crate) fn check(saved: Option<&ServedState>, sync_steps: u64) -> Result<()> {
        match saved {
            Some(saved) if saved.sync_steps != sync_steps => Err(TrainError::OtherStepUnit {
                saved: saved.sync_steps,
                own: sync_steps,
            }),
            _ => Ok(()),
        }
    }
}

/// Serves the first `num_steps` steps of a run with the parameters of `trainer`; `after_step` is called after each of them. This is a
/// collective call.
pub fn serve_steps(
    service: Service<'_>,
    num_steps: u64,
    trainer: &mut Trainer,
    world: &World,
    mut after_step: impl FnMut(&Trainer, &StepOutcome) -> Result<()>,
) -> Result<()> {
    let mut server = GradientServer::start(service, num_steps, trainer, world)?;
    for _ in 0..num_steps {
        let outcome = server.step(trainer, world)?;
        after_step(trainer, &outcome)?;
    }
    server.finish();
    Ok(())
}

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

/// What servers and workers must have in common: everything but communication, and the global batch size, which servers tell
/// workers.
fn digest(config: &Config) -> Result<String> {
    let mut config = config.clone();
    config.training.global_batch_size = None;
    config.comm = CommSection::default();
    let text = config.to_toml()?;
    Ok(Digest::of(text.as_bytes()).to_string())
}

//! The part of this process in a run with parameter servers.

use std::num::NonZero;

use trainyard_config::Workers;
use trainyard_torch::World;
use trainyard_trace::Ledger;
use trainyard_train::parameter_server::{self, Role, Service};
use trainyard_train::{TrainError, TrainSpec};

use crate::error::{EngineError, Result};
use crate::ranks::join;

/// What this process is.
pub enum Part {
    /// A server.
    Server(Box<Server>),
    /// A rank of a worker.
    Worker {
        /// The addresses of the servers, the leader first.
        servers: Vec<String>,
    },
}

/// A parameter server.
pub struct Server {
    /// Its config.
    pub spec: TrainSpec,
    /// The number of servers.
    pub num_servers: usize,
    address: String,
    workers: Workers,
}

impl Server {
    /// What it serves to the workers of `run`.
    pub fn service<'a>(&'a self, run: &'a TrainSpec) -> Service<'a> {
        Service {
            run,
            address: &self.address,
            workers: self.workers,
        }
    }
}

impl Part {
    /// The part that the launcher has given to this process; `None` in a run without parameter servers.
    pub fn from_environment(run: &TrainSpec) -> Result<Option<Part>> {
        let num_ranks = std::env::var("WORLD_SIZE").ok();
        let num_ranks = num_ranks.and_then(|text| text.parse().ok()).unwrap_or(1);
        Ok(match parameter_server::role()? {
            None => None,
            Some(Role::Server {
                address,
                num_workers,
                ranks_per_worker,
            }) => {
                let workers = Workers {
                    num: num_workers,
                    ranks_each: ranks_per_worker,
                };
                let config = run.for_servers(num_ranks, workers);
                Some(Part::Server(Box::new(Server {
                    spec: run.with_config(config.map_err(TrainError::from)?),
                    num_servers: num_ranks,
                    address,
                    workers,
                })))
            }
            Some(Role::Worker { servers }) => {
                run.check_served(num_ranks).map_err(TrainError::from)?;
                Some(Part::Worker { servers })
            }
        })
    }
}

/// Joins the other ranks of a worker, and works until there is no work left. Returns what it has exchanged.
pub fn work(run: &TrainSpec, servers: &[String], ledger: fn(usize) -> Ledger) -> Result<World> {
    let world = join(run, ledger)?;
    parameter_server::work(run, &world, servers)?;
    Ok(world)
}

/// Divides ranks among workers.
pub fn workers(num_ranks: usize, ranks_each: NonZero<usize>) -> Result<Workers> {
    Workers::of_ranks(num_ranks, ranks_each).ok_or_else(|| {
        EngineError::Rank(format!(
            "{num_ranks} ranks are not a whole number of workers with {ranks_each} ranks each (--nproc-per-worker)"
        ))
    })
}

//! The options of `run` for parameter servers, and the processes that the launcher starts for them.

use std::net::TcpListener;
use std::num::NonZero;
use std::path::{Path, PathBuf};

use clap::Args;
use trainyard_config::Workers;
use trainyard_launcher::{Job, ServedJob};
use trainyard_param_server::{IS_SERVER, NUM_WORKERS, RANKS_PER_WORKER, SERVERS};
use trainyard_peer_checkpoint::{ReplicaServer, SECRET_FILE};
use trainyard_tls::{RunSecret, SecretFile};

use super::replica_args::ReplicaArgs;
use crate::failure::Failure;

/// Parameter servers of asynchronous training.
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// Start this many parameter servers on this node: the ranks become workers, which push gradients to them, as the
    /// section [parameter_server] of the config says
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=64))]
    servers: Option<u64>,
    /// Where parameter servers listen, one per server, the leader first. Without --servers, they run on another node, and this
    /// one only starts workers. The default is 127.0.0.1 with free ports
    #[arg(
        long,
        value_name = "HOST:PORT,..",
        value_delimiter = ',',
        requires = "run_secret_file"
    )]
    server_endpoints: Vec<String>,
    /// Ranks of each worker, for workers that take steps of their own ([local_updates]): a mesh of these ranks is one replica
    #[arg(long, value_name = "N", default_value = "1")]
    nproc_per_worker: NonZero<usize>,
    /// Workers on all nodes, among which the servers divide a step. The default are the workers of this node
    #[arg(long, value_name = "N", requires = "servers")]
    num_workers: Option<NonZero<usize>>,
}

/// A run with parameter servers, and the secret that its processes share.
#[derive(Debug)]
pub struct ServedRun {
    /// The processes of this node.
    pub job: ServedJob,
    secret: Secret,
}

/// The run secret: the user's, or a random one for the processes of this node.
#[derive(Debug)]
struct Secret {
    secret: RunSecret,
    path: PathBuf,
    /// Lives as long as the run.
    _file: Option<SecretFile>,
}

impl ServedRun {
    /// Starts a replica server that keeps in-memory checkpoints of the servers while they restart.
    pub fn start_replica_server(&mut self, replicas: &ReplicaArgs) -> Option<ReplicaServer> {
        let Secret { secret, path, .. } = &self.secret;
        replicas.start_on_loopback(secret, path, self.job.servers.as_mut()?)
    }
}

impl ServerArgs {
    /// Whether the ranks of the run are workers.
    pub fn is_served(&self) -> bool {
        self.servers.is_some() || !self.server_endpoints.is_empty()
    }

    /// Makes the ranks of `job` workers, each a world of one or several ranks, and adds servers.
    pub fn served_run(&self, job: &Job, secret_file: Option<&Path>) -> Result<ServedRun, Failure> {
        if job.num_nodes > 1 {
            let message = "parameter servers have workers on any nodes: --nnodes does not apply";
            return Err(Failure::usage(message).hint(
                "start `trainyard run --server-endpoints HOST:PORT,.. --run-secret-file FILE` on every other node",
            ));
        }
        let secret = Secret::of(secret_file)?;
        let path = &secret.path;
        let endpoints = self.endpoints()?.join(",");
        let ranks_each = self.nproc_per_worker.get();
        let num_here = self.num_workers_here(job.nproc)?;
        let num_workers = self.num_workers.map_or(num_here, NonZero::get).to_string();
        let shared = |job: Job| {
            let job = job.env(SERVERS, &endpoints).env(SECRET_FILE, path);
            // Servers and workers share the cores of the node.
            match std::env::var_os("OMP_NUM_THREADS") {
                Some(_) => job,
                None => job.env("OMP_NUM_THREADS", "1"),
            }
        };
        let servers = self.servers.map(|num| {
            let mut servers = shared(job.clone());
            servers.nproc = num as usize;
            servers.output.label = Some(("server".to_owned(), 0));
            servers.output.log_dir = subdir(job, "servers");
            servers
                .env(IS_SERVER, "1")
                .env(NUM_WORKERS, &num_workers)
                .env(RANKS_PER_WORKER, ranks_each.to_string())
        });
        let workers = (0..num_here).map(|index| {
            let mut worker = shared(job.clone());
            worker.nproc = ranks_each;
            worker.output.label = Some(match ranks_each {
                1 => ("worker".to_owned(), index),
                _ => (format!("worker{index} rank"), 0),
            });
            worker.output.log_dir = subdir(job, &format!("worker_{index}"));
            // A worker waits for others as long as the staleness bound says; servers notice one that is lost.
            worker.hang_timeout = None;
            // What the servers observe is the whole job.
            if self.servers.is_some() || index > 0 {
                worker.observer = None;
            }
            // Its GPUs are those after the ones of the workers before.
            worker.first_local_rank = index * ranks_each;
            worker
        });
        Ok(ServedRun {
            job: ServedJob {
                servers,
                workers: workers.collect(),
            },
            secret,
        })
    }

    /// The number of workers that the ranks of this node are.
    fn num_workers_here(&self, nproc: usize) -> Result<usize, Failure> {
        let ranks_each = self.nproc_per_worker;
        let workers = Workers::of_ranks(nproc, ranks_each);
        workers.map(|workers| workers.num).ok_or_else(|| {
            let whole = nproc.next_multiple_of(ranks_each.get());
            Failure::usage(format!(
                "--nproc-per-node {nproc} is not a multiple of --nproc-per-worker {ranks_each}"
            ))
            .hint(format!("use --nproc-per-node {whole}"))
        })
    }

    /// The addresses of all servers.
    fn endpoints(&self) -> Result<Vec<String>, Failure> {
        let num_servers = self.servers.map(|num| num as usize);
        if self.server_endpoints.is_empty() {
            return free_endpoints(num_servers.unwrap_or(0))
                .map_err(|error| Failure::new(format!("cannot find a free port: {error}")));
        }
        let num_endpoints = self.server_endpoints.len();
        match num_servers {
            Some(num) if num != num_endpoints => {
                let message = format!(
                    "--servers {num} needs {num} addresses, but --server-endpoints has {num_endpoints}"
                );
                Err(Failure::usage(message).hint("list one per server"))
            }
            _ => Ok(self.server_endpoints.clone()),
        }
    }
}

/// Free ports of the loopback interface. They are kept until all are found, so that they differ.
fn free_endpoints(num: usize) -> std::io::Result<Vec<String>> {
    let listeners = (0..num).map(|_| TcpListener::bind("127.0.0.1:0"));
    let listeners = listeners.collect::<Result<Vec<_>, _>>()?;
    let addresses = listeners.iter().map(TcpListener::local_addr);
    addresses.map(|address| Ok(address?.to_string())).collect()
}

impl Secret {
    fn of(named: Option<&Path>) -> Result<Secret, Failure> {
        if let Some(path) = named {
            return Ok(Secret {
                secret: RunSecret::read(path).map_err(Failure::usage)?,
                path: path.to_owned(),
                _file: None,
            });
        }
        let failed = |error| Failure::new(format!("cannot make a run secret: {error}"));
        let file = SecretFile::random().map_err(failed)?;
        Ok(Secret {
            secret: file.secret.clone(),
            path: file.path.clone(),
            _file: Some(file),
        })
    }
}

fn subdir(job: &Job, name: &str) -> Option<PathBuf> {
    job.output.log_dir.as_ref().map(|dir| dir.join(name))
}

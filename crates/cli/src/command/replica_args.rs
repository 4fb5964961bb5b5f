//! The options of `run` for in-memory peer checkpoints, and the replica server that the launcher starts for them.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use trainyard_launcher::Job;
use trainyard_peer_checkpoint::{
    REPLICA_SERVER, REPLICA_SERVER_INDEX, REPLICA_SERVERS, ReplicaPlacement, ReplicaServer,
    SECRET_FILE,
};
use trainyard_tls::{RunSecret, SecretFile};

use crate::failure::Failure;

/// The capacity of a replica server on a system that does not report its memory.
const DEFAULT_CAPACITY: u64 = 1 << 30;

/// Where replicas of the ranks' state are kept.
#[derive(Debug, Args)]
pub struct ReplicaArgs {
    /// The replica servers of all nodes, in the order of nodes; this program starts the one of this node. Without it,
    /// a job on one node has a replica server on 127.0.0.1
    #[arg(long, value_name = "HOST:PORT,..", requires = "run_secret_file")]
    replica_servers: Option<String>,
    /// The replica servers are running already, as `trainyard replica-server`
    #[arg(long, requires = "replica_servers")]
    external_replica_servers: bool,
    /// The secret that only nodes of the run know, for the rendezvous and for replica servers: 64 hexadecimal digits,
    /// in a file of mode 600
    #[arg(long, value_name = "FILE")]
    run_secret_file: Option<PathBuf>,
    /// How many bytes the replica server of this node keeps at most [default: half of the memory]
    #[arg(long, value_name = "BYTES")]
    replica_bytes: Option<u64>,
}

/// The replica server of this node and its secret. Dropping it discards the replicas.
#[derive(Debug, Default)]
pub struct ReplicaService {
    _server: Option<ReplicaServer>,
    _secret_file: Option<SecretFile>,
}

impl ReplicaArgs {
    /// Starts the replica server of this node, if it is to have one, and passes the addresses of all to the ranks.
    pub fn start(&self, job: &mut Job) -> Result<ReplicaService, Failure> {
        match (&self.replica_servers, &self.run_secret_file) {
            (Some(servers), Some(secret_file)) => self.start_static(servers, secret_file, job),
            (None, Some(_)) => {
                let message = "--run-secret-file is for a run on several nodes, and this one has no rendezvous";
                Err(Failure::usage(message)
                    .hint("add --replica-servers, or --rdzv-backend and --rdzv-endpoint"))
            }
            _ if job.num_nodes == 1 => Ok(self.start_local(job)),
            // A replica server is of no use if the other nodes do not know its address.
            _ => Ok(ReplicaService::default()),
        }
    }

    /// The file with the run secret, if the user named one.
    pub fn secret_file(&self) -> Option<&Path> {
        self.run_secret_file.as_deref()
    }

    /// Starts the replica server of this node in an elastic run; the ranks exchange the addresses of all.
    pub fn start_elastic(
        &self,
        host: &str,
        secret: &RunSecret,
        secret_file: &Path,
        job: &mut Job,
    ) -> Result<ReplicaService, Failure> {
        if self.replica_servers.is_some() {
            let message = "--replica-servers lists fixed nodes, but with this --rdzv-backend nodes join and leave";
            return Err(Failure::usage(message).hint("omit it: every agent has a replica server"));
        }
        let address = if host.contains(':') {
            format!("[{host}]:0")
        } else {
            format!("{host}:0")
        };
        let server =
            ReplicaServer::start(&address, self.capacity(), secret).map_err(Failure::new)?;
        job.env.extend([
            (REPLICA_SERVER.into(), server.address().to_string().into()),
            (SECRET_FILE.into(), secret_file.into()),
        ]);
        Ok(ReplicaService {
            _server: Some(server),
            _secret_file: None,
        })
    }

    fn start_static(
        &self,
        servers: &str,
        secret_file: &Path,
        job: &mut Job,
    ) -> Result<ReplicaService, Failure> {
        let placement = ReplicaPlacement::parse(servers, job.node_rank)
            .map_err(|error| Failure::usage(format!("--replica-servers: {error}")))?;
        let num_servers = placement.servers().len();
        if num_servers != job.num_nodes {
            let message = format!(
                "--replica-servers lists {num_servers} for {} nodes",
                job.num_nodes
            );
            return Err(Failure::usage(message).hint("list one per node, in the order of nodes"));
        }
        let secret = RunSecret::read(secret_file).map_err(Failure::usage)?;
        let server = (!self.external_replica_servers)
            .then(|| ReplicaServer::start(placement.local_server(), self.capacity(), &secret))
            .transpose();
        let server = server.map_err(|error| {
            let hint = "if `trainyard replica-server` runs there, add --external-replica-servers";
            Failure::new(error).hint(hint)
        })?;
        set_environment(job, servers, job.node_rank, secret_file);
        Ok(ReplicaService {
            _server: server,
            _secret_file: None,
        })
    }

    /// Starts a replica server for a job on one node. The job runs without one as well, so errors are only logged.
    fn start_local(&self, job: &mut Job) -> ReplicaService {
        match SecretFile::random() {
            Ok(file) => ReplicaService {
                _server: self.start_on_loopback(&file.secret, &file.path, job),
                _secret_file: Some(file),
            },
            Err(error) => {
                tracing::warn!("there are no in-memory checkpoints: {error}");
                ReplicaService::default()
            }
        }
    }

    /// Starts a replica server for processes of this node that share a secret. They run without one as well, so errors are
    /// only logged.
    pub fn start_on_loopback(
        &self,
        secret: &RunSecret,
        secret_file: &Path,
        job: &mut Job,
    ) -> Option<ReplicaServer> {
        match ReplicaServer::start("127.0.0.1:0", self.capacity(), secret) {
            Ok(server) => {
                set_environment(job, &server.address().to_string(), 0, secret_file);
                Some(server)
            }
            Err(error) => {
                tracing::warn!("there are no in-memory checkpoints: {error}");
                None
            }
        }
    }

    fn capacity(&self) -> u64 {
        self.replica_bytes.unwrap_or_else(half_of_memory)
    }
}

fn set_environment(job: &mut Job, servers: &str, index: usize, secret_file: &Path) {
    job.env.extend([
        (REPLICA_SERVERS.into(), servers.into()),
        (REPLICA_SERVER_INDEX.into(), index.to_string().into()),
        (SECRET_FILE.into(), secret_file.into()),
    ]);
}

/// Half of the memory of this node.
pub fn half_of_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    total_memory(&text).map_or(DEFAULT_CAPACITY, |total| total / 2)
}

fn total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        replicas: ReplicaArgs,
    }

    fn parse(line: &str) -> Result<ReplicaArgs, clap::Error> {
        let words = ["run"].into_iter().chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| cli.replicas)
    }

    fn variables(job: &Job) -> Vec<String> {
        let names = job.env.iter().map(|(name, _)| name.clone());
        names.map(|name| name.into_string().unwrap()).collect()
    }

    #[test]
    fn a_job_on_one_node_has_a_replica_server_by_default() {
        let mut job = Job::new("p", 1);
        let _service = parse("").unwrap().start(&mut job).unwrap();
        assert_eq!(
            variables(&job),
            [REPLICA_SERVERS, REPLICA_SERVER_INDEX, SECRET_FILE]
        );
    }

    #[test]
    fn a_job_on_several_nodes_has_the_listed_replica_servers() {
        let mut job = Job::new("p", 1);
        job.num_nodes = 2;
        let _service = parse("").unwrap().start(&mut job).unwrap();
        assert_eq!(variables(&job), [""; 0]);
        assert!(parse("--replica-servers a:1,b:2").is_err(), "no secret");
        assert!(parse("--external-replica-servers").is_err(), "no servers");
        let secret_only = parse("--run-secret-file s").unwrap();
        assert!(
            secret_only.start(&mut Job::new("p", 1)).is_err(),
            "no servers"
        );
        let secret = SecretFile::random().unwrap();
        let secret = secret.path.display();
        let line =
            format!("--external-replica-servers --run-secret-file {secret} --replica-servers");
        for (list, is_valid) in [("a:1,b:2", true), ("a:1", false), ("a,b", false)] {
            let args = parse(&format!("{line} {list}")).unwrap();
            assert_eq!(args.start(&mut job).is_ok(), is_valid, "{list}");
        }
    }

    #[test]
    fn the_memory_size_is_read_from_meminfo() {
        assert_eq!(total_memory("MemTotal:  2 kB\nMemFree: 1 kB\n"), Some(2048));
        assert_eq!(total_memory("MemTotal: lots\n"), None);
        assert!(half_of_memory() > 0);
    }
}

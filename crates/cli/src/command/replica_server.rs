//! `trainyard replica-server`: a replica server as a process of its own.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use trainyard_tls::RunSecret;

use super::replica_args::half_of_memory;
use crate::failure::Failure;
use crate::log;

/// Keep in-memory checkpoints of a run on this node, for as long as this process lives
///
/// `trainyard run` has a replica server of its own; this one outlives it, so it also keeps the state of a job that is
/// restarted as a whole. It listens on one address and serves clients that know the run secret. A replica server is
/// for one run: start another one for another run.
#[derive(Debug, Args)]
#[command(after_help = "Example, on each of two nodes:\n  \
    trainyard replica-server --listen 10.0.0.1:7001 --run-secret-file llama7.secret\n  \
    trainyard run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 \\\n    \
      --replica-servers 10.0.0.1:7001,10.0.0.2:7001 --external-replica-servers \\\n    \
      --run-secret-file llama7.secret \\\n    \
      -- trainyard train configs/llama-tiny.toml --checkpoint.memory_interval 10")]
pub struct ReplicaServer {
    /// The only address to listen on; port 0 selects a free port
    #[arg(long, value_name = "HOST:PORT")]
    listen: String,
    /// The secret that only nodes of the run know: 64 hexadecimal digits, in a file of mode 600
    #[arg(long, alias = "run_secret_file", value_name = "FILE")]
    run_secret_file: PathBuf,
    /// How many bytes to keep at most [default: half of the memory]
    #[arg(long, alias = "replica_bytes", value_name = "BYTES")]
    replica_bytes: Option<u64>,
}

impl ReplicaServer {
    /// Serves until the process is killed.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        log::to_stderr("info");
        let secret = RunSecret::read(&self.run_secret_file).map_err(Failure::usage)?;
        let capacity = self.replica_bytes.unwrap_or_else(half_of_memory);
        let server =
            trainyard_peer_checkpoint::ReplicaServer::start(&self.listen, capacity, &secret)
                .map_err(|error| Failure::new(error).hint("choose another --listen"))?;
        println!(
            "replica server at {}, at most {capacity} bytes",
            server.address()
        );
        server.serve_forever();
        Ok(ExitCode::SUCCESS)
    }
}

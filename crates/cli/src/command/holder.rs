//! `trainyard holder`: a holder of copies as a process of its own.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use trainyard_copies::Secret;

use super::holding::half_of_memory;
use crate::failure::Failure;
use crate::log;

/// Keep copies of the ranks' state in this machine's memory, for as long as this runs
///
/// `trainyard run` has a holder of its own; this one outlives it, and so a whole job that is started
/// again. It listens at one address and serves whoever knows the run's secret. A holder is for one
/// run: start another for another.
#[derive(Debug, Args)]
#[command(after_help = "Example, on each of two machines:\n  \
    trainyard holder --listen 10.0.0.1:7001 --run-secret-file secret\n  \
    trainyard run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 \\\n    \
      --holders 10.0.0.1:7001,10.0.0.2:7001 --external-holders --run-secret-file secret \\\n    \
      -- trainyard train configs/llama-tiny.toml --checkpoint.memory_interval 10")]
pub struct Holder {
    /// Where to listen, and nowhere else; port 0 is any free one
    #[arg(long, value_name = "HOST:PORT")]
    listen: String,
    /// What only members of the run know: 16 bytes or more, in a file of mode 600
    #[arg(long, alias = "run_secret_file", value_name = "FILE")]
    run_secret_file: PathBuf,
    /// How many bytes to keep at most; half of the memory when not given
    #[arg(long, alias = "holder_bytes", value_name = "BYTES")]
    holder_bytes: Option<u64>,
}

impl Holder {
    /// Holds until it is ended.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        log::to_stderr("info");
        let secret = Secret::read(&self.run_secret_file).map_err(Failure::usage)?;
        let capacity = self.holder_bytes.unwrap_or_else(half_of_memory);
        let holder = trainyard_copies::Holder::start(&self.listen, capacity, secret)
            .map_err(|error| Failure::new(error).hint("choose another --listen"))?;
        println!("holder at {}, at most {capacity} bytes", holder.address());
        holder.serve();
        Ok(ExitCode::SUCCESS)
    }
}

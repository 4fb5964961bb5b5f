//! `trainyard rendezvous`: the rendezvous server of a run.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use trainyard_rendezvous::server::{Limits, serve_forever};
use trainyard_tls::RunSecret;

use crate::failure::Failure;

/// Run a rendezvous server, which assigns ranks to the nodes of one run
///
/// Listens on the given address only. Every agent must know the run secret; the server generates it if the file does
/// not exist: copy the file to every node. The server stores the state of the run in a file, so it can be restarted
/// without interrupting the run.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    trainyard rendezvous --rdzv-id llama7 --bind 10.0.0.1:29400 --run-secret-file llama7.secret --record llama7.json")]
pub struct Rendezvous {
    /// Name of the run
    #[arg(long, value_name = "ID")]
    rdzv_id: String,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:29400")]
    bind: SocketAddr,
    /// The secret that only nodes of the run know: 64 hexadecimal digits, in a file of mode 600
    #[arg(long, alias = "run_secret_file", value_name = "FILE")]
    run_secret_file: PathBuf,
    /// File for the state of the run
    #[arg(long, value_name = "FILE")]
    record: PathBuf,
}

impl Rendezvous {
    /// Serves the run until an error occurs.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        tracing_subscriber::fmt()
            .with_writer(std::io::stderr)
            .init();
        let secret = RunSecret::read_or_create(&self.run_secret_file).map_err(Failure::new)?;
        let ready = |address| println!("rendezvous of run {} at {address}", self.rdzv_id);
        let limits = Limits::default();
        serve_forever(
            self.bind,
            &self.rdzv_id,
            &secret,
            &self.record,
            limits,
            ready,
        )
        .map_err(Failure::new)?;
        Ok(ExitCode::SUCCESS)
    }
}

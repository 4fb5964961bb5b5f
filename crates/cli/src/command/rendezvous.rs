//! `trainyard rendezvous`: the place where the nodes of a run meet.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use trainyard_rendezvous::Secret;
use trainyard_rendezvous::server::{Limits, serve_forever};

use crate::failure::Failure;

/// Serve the rendezvous of one run: which nodes are in it, and which rank each has
///
/// Listens on the named address only. Whoever connects must know the run's secret, which is made if the file
/// is not there; copy the file to every node. The record of the run is kept in a file, so the server can be
/// restarted while the run goes on.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    trainyard rendezvous --rdzv-id llama7 --bind 10.0.0.1:29400 --secret-file llama7.secret --record llama7.json")]
pub struct Rendezvous {
    /// The run
    #[arg(long, value_name = "ID")]
    rdzv_id: String,
    /// Where to listen
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:29400")]
    bind: SocketAddr,
    /// The run's secret: 64 hexadecimal digits that only its owner may read
    #[arg(long, value_name = "FILE")]
    secret_file: PathBuf,
    /// Where the run's record is kept
    #[arg(long, value_name = "FILE")]
    record: PathBuf,
}

impl Rendezvous {
    /// Serves until it cannot go on.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        tracing_subscriber::fmt()
            .with_writer(std::io::stderr)
            .init();
        let secret = Secret::read_or_create(&self.secret_file).map_err(Failure::new)?;
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

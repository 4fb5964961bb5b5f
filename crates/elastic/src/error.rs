//! Errors of the agent. A worker that fails is not one of them.

use std::io;

use trainyard_launcher::LaunchError;
use trainyard_rendezvous::RendezvousError;

/// Why an agent cannot take part in a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The agent cannot join the run, or was disconnected from it.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The agent cannot start or supervise workers.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The agent cannot serve the workers' store.
    #[error("cannot serve the workers' TCPStore at {address}: {source}")]
    Store {
        /// The address to listen on.
        address: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// An operating system error that the agent cannot recover from.
    #[error("cannot run the agent: {0}")]
    Io(#[from] io::Error),
}

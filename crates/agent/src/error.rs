//! Why an agent could not do its part. A worker that fails is not an error of the agent.

use std::io;

use trainyard_elastic::LaunchError;
use trainyard_rendezvous::RendezvousError;

/// Why an agent could not do its part.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// There is no way to the run, or none any more.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// Workers cannot be started or watched at all.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The workers' store cannot be served.
    #[error("cannot serve the workers' store at {address}: {source}")]
    Store {
        /// Where.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// The agent itself cannot run.
    #[error("cannot run an agent: {0}")]
    Io(#[from] io::Error),
}

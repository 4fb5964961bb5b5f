//! What an agent needs of a rendezvous, whoever decides and however it is reached.

use std::sync::Arc;

use async_trait::async_trait;

use crate::{Decision, Epoch, Join, Refusal, Report};

/// A way to a run.
#[async_trait]
pub trait Backend: Send + Sync {
    /// Joins. Returns when the agent is known and holds a lease, which [`Seat::heartbeat`] keeps.
    ///
    /// Tries again for as long as [`Policy::join_timeout`](crate::Policy::join_timeout) when nobody answers or the
    /// refusal may pass, as that of a name whose last holder has just died.
    async fn join(&self, join: Join) -> Result<Arc<dyn Seat>, RendezvousError>;
}

/// An agent's seat in a run. It finds its way back by itself when a connection breaks.
#[async_trait]
pub trait Seat: Send + Sync {
    /// What to do now. It may change at any time, so whoever is about to commit something looks once more.
    fn decision(&self) -> Decision;

    /// Waits until there is something else to do than this method last said, and says what. Only the newest counts:
    /// what was true only in between is left out.
    async fn next(&self) -> Result<Decision, RendezvousError>;

    /// Keeps the lease. To be called every [`Policy::heartbeat`](crate::Policy::heartbeat), from the loop that looks
    /// after the workers, so that an agent that hangs is taken for lost. Does not wait for the answer.
    async fn heartbeat(&self);

    /// Says how the workers of an epoch are. Repeated until it is heard.
    async fn report(&self, epoch: Epoch, report: Report);

    /// Gives up the place. To be called when no workers are left.
    async fn leave(&self);
}

/// Why there is no way to a run, or none any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// The run does not want this agent.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Nobody answered in time.
    #[error("cannot reach the rendezvous at {endpoint}: {cause}")]
    Unreachable {
        /// Where.
        endpoint: String,
        /// What happened the last time.
        cause: String,
    },
    /// The seat was given up.
    #[error("this agent has left the run")]
    Left,
    /// What is stored is not what this program writes.
    #[error("{what} of run `{run}` cannot be read: {cause}")]
    Unreadable {
        /// What.
        what: String,
        /// The run.
        run: String,
        /// Why not.
        cause: String,
    },
    /// The secret cannot be used.
    #[error("the run's secret {path}: {cause}")]
    Secret {
        /// The file.
        path: String,
        /// Why not.
        cause: String,
    },
    /// A server cannot serve.
    #[error("cannot serve at {address}: {cause}")]
    Serve {
        /// Where.
        address: String,
        /// Why not.
        cause: String,
    },
    /// The record cannot be kept, so nothing may be decided.
    #[error("cannot keep the record of the run in {path}: {cause}")]
    Disk {
        /// The file.
        path: String,
        /// Why not.
        cause: String,
    },
}

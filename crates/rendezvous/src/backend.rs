//! The interface between an agent and a rendezvous, whichever backend it uses.

use std::sync::Arc;

use async_trait::async_trait;

use crate::{Decision, Epoch, Join, Rejection, Report};

/// A rendezvous for one run.
#[async_trait]
pub trait Backend: Send + Sync {
    /// Joins the run. Returns when the agent holds a lease, which [`Membership::heartbeat`] renews.
    ///
    /// Retries for up to [`Policy::join_timeout`](crate::Policy::join_timeout) while the rendezvous does not respond
    /// or its rejection is temporary, for example while the lease of a crashed agent of the same name still lasts.
    async fn join(&self, join: Join) -> Result<Arc<dyn Membership>, RendezvousError>;
}

/// An agent's membership in a run. It reconnects by itself.
#[async_trait]
pub trait Membership: Send + Sync {
    /// The current decision. It can change at any time, so check it again right before committing anything.
    fn decision(&self) -> Decision;

    /// Waits until the decision differs from the one that this method returned last. Skips decisions that were
    /// replaced in the meantime.
    async fn next(&self) -> Result<Decision, RendezvousError>;

    /// Renews the lease, without waiting for the response. Call it every
    /// [`Policy::heartbeat`](crate::Policy::heartbeat) from the loop that watches the workers, so that a stalled
    /// agent loses its lease.
    async fn heartbeat(&self);

    /// Reports the state of the workers of an epoch. The report is repeated until it is acknowledged.
    async fn report(&self, epoch: Epoch, report: Report);

    /// Leaves the run. Call it only when no workers are left.
    async fn leave(&self);
}

/// Why an agent cannot join a run or stay in it, or why a server cannot serve one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// The run rejected this agent.
    #[error(transparent)]
    Rejected(#[from] Rejection),
    /// The rendezvous did not respond in time.
    #[error("cannot reach the rendezvous at {endpoint}: {cause}")]
    Unreachable {
        /// The address, or the addresses, that the agent tried.
        endpoint: String,
        /// The last error.
        cause: String,
    },
    /// This agent left the run.
    #[error("this agent has left the run")]
    Left,
    /// The stored state of the run is damaged or belongs to another run.
    #[error("cannot read {what} of run `{run}`: {cause}")]
    Unreadable {
        /// The file or the key.
        what: String,
        /// The run.
        run: String,
        /// What is wrong with it.
        cause: String,
    },
    /// Another version of Trainyard wrote the stored state of the run.
    #[error(
        "{what} of run `{run}` has format version {found}, but this build reads and writes version {supported}: \
         finish the run with the build that wrote it, or delete {what} to start the run over"
    )]
    FormatVersion {
        /// The file or the key.
        what: String,
        /// The run.
        run: String,
        /// The version in the file or under the key; 1 for builds that wrote none.
        found: u32,
        /// The version of this build.
        supported: u32,
    },
    /// The server speaks another version of the protocol.
    #[error(
        "the rendezvous server at {endpoint} does not speak protocol version {supported} of this build ({found}): \
         run the same build of trainyard on the server and on every node"
    )]
    ProtocolVersion {
        /// The server.
        endpoint: String,
        /// What the server reported about its own version.
        found: String,
        /// The version of this build.
        supported: u32,
    },
    /// A server cannot start or go on.
    #[error("cannot serve the rendezvous at {address}: {cause}")]
    Serve {
        /// The address to listen on.
        address: String,
        /// The error.
        cause: String,
    },
    /// The server cannot write the run's record, so it may not decide anything.
    #[error("cannot write the record of the run to {path}: {cause}")]
    RecordWrite {
        /// The file.
        path: String,
        /// The error.
        cause: String,
    },
}

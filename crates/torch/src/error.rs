//! Errors of libtorch, of callbacks and of communication.

use std::fmt;

use trainyard_trace::CollectiveKind;

/// The result type of this crate.
pub type Result<T, E = TorchError> = std::result::Result<T, E>;

/// An error of libtorch, of a callback, or of communication.
#[derive(Debug, thiserror::Error)]
pub enum TorchError {
    /// A collective, send or recv failed.
    #[error(transparent)]
    Communication(#[from] Box<CommunicationError>),
    /// A process group could not be created.
    #[error("rank {rank}: cannot create the {backend} process group {group}: {message}")]
    GroupInit {
        /// Global rank of this process.
        rank: usize,
        /// The name of the group.
        group: String,
        /// `gloo` or `nccl`.
        backend: &'static str,
        /// Why, and what to do.
        message: String,
    },
    /// A store operation failed.
    #[error("store {address}: {operation} {key:?} failed: {message}")]
    Store {
        /// `host:port` of the store.
        address: String,
        /// `set`, `get`, ...
        operation: &'static str,
        /// The key, empty if the operation has none.
        key: String,
        /// The reason, mostly libtorch's message.
        message: String,
    },
    /// An environment variable that the launcher sets is missing or malformed.
    #[error("environment variable {name} {problem}: start ranks with `trainyard run` or torchrun")]
    Environment {
        /// The name of the variable.
        name: &'static str,
        /// `is not set`, or why its value is invalid.
        problem: String,
    },
    /// A backward pass reached a custom function a second time.
    #[error(
        "backward reached a function whose graph was released; keep the graph to run backward a second time"
    )]
    GraphReleased,
    /// A Rust callback panicked inside libtorch.
    #[error("{what} panicked: {message}")]
    Panicked {
        /// The callback that panicked.
        what: &'static str,
        /// The panic's message.
        message: String,
    },
    /// The arguments of an operation are invalid.
    #[error("{0}")]
    Invalid(String),
    /// The device mesh does not have the requested group or rank.
    #[error(transparent)]
    Mesh(#[from] trainyard_mesh::MeshError),
    /// libtorch threw an exception.
    #[error("{0}")]
    Torch(String),
    /// An error that a hook of the caller returned.
    #[error("{0}")]
    Other(String),
}

impl From<cxx::Exception> for TorchError {
    fn from(e: cxx::Exception) -> Self {
        TorchError::Torch(e.what().to_owned())
    }
}

impl From<tch::TchError> for TorchError {
    fn from(e: tch::TchError) -> Self {
        TorchError::Torch(without_backtrace(&e.to_string()).to_owned())
    }
}

/// Removes the C++ stack that libtorch appends to every message, which does not help users.
pub(crate) fn without_backtrace(message: &str) -> &str {
    let end = message
        .find("\nException raised from")
        .unwrap_or(message.len());
    message[..end].trim_end()
}

/// A failed collective, send or recv.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "rank {rank}: {kind} #{sequence} in group {group} of {group_size} ({operands}) failed: {cause}"
)]
pub struct CommunicationError {
    /// Global rank of this process.
    pub rank: usize,
    /// The kind of the collective.
    pub kind: CollectiveKind,
    /// The group's name.
    pub group: String,
    /// Number of ranks in the group.
    pub group_size: usize,
    /// Sequence number of the collective in its group, from 0.
    pub sequence: u64,
    /// Types and shapes of the tensors.
    pub operands: String,
    /// Why the collective failed.
    pub cause: Cause,
}

/// Why a collective failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// A peer did not take part before the timeout.
    Timeout(String),
    /// The connection to a peer was closed: its process exited or aborted the group.
    PeerLost {
        /// The ranks that closed their connections first, as far as they are known.
        ranks: Vec<usize>,
        /// The backend's message.
        message: String,
    },
    /// This rank aborted the group ([`crate::Group::abort`]).
    Aborted,
    /// The tensors are not valid for the collective.
    Operands(String),
    /// Any other failure, with the backend's message.
    Backend(String),
}

impl Cause {
    /// Classifies a message of Gloo or NCCL.
    pub(crate) fn from_message(message: &str, aborted: bool) -> Cause {
        let has = |phrases: &[&str]| phrases.iter().any(|phrase| message.contains(phrase));
        if aborted {
            Cause::Aborted
        } else if has(&["Timed out", "timed out", "timeout"]) {
            Cause::Timeout(message.to_owned())
        } else if has(&[
            "Connection closed by peer",
            "Connection reset by peer",
            "Broken pipe",
            "Socket closed",
            "Connection refused",
            "Connection closed by remote peer",
            "ncclRemoteError",
            "remote process exit",
        ]) {
            Cause::PeerLost {
                ranks: Vec::new(),
                message: without_advice(message).to_owned(),
            }
        } else {
            Cause::Backend(message.to_owned())
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Timeout(m) => write!(
                f,
                "timed out: a peer did not take part ({m}); look for a rank that failed or hung earlier"
            ),
            Cause::PeerLost { ranks, message } => write!(
                f,
                "lost the connection to {} ({message}): it failed, which the launcher reports, or it ended its training loop \
                 before this rank; if ranks have different numbers of batches, loop over `Join`",
                named(ranks)
            ),
            Cause::Aborted => write!(f, "this rank aborted the group"),
            Cause::Operands(m) => write!(f, "{m}"),
            Cause::Backend(m) => write!(f, "{m}"),
        }
    }
}

/// Removes the advice that Gloo appends to the message of a closed connection; ours is more specific.
fn without_advice(message: &str) -> &str {
    let end = message.find(". This is typically caused by");
    &message[..end.unwrap_or(message.len())]
}

/// The ranks, as far as they are known.
fn named(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match &numbers[..] {
        [] => "a peer".to_owned(),
        [one] => format!("rank {one}"),
        several => format!("ranks {}", several.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gloo_messages_are_classified() {
        let lost =
            Cause::from_message("[pair.cc:1] Connection closed by peer [127.0.0.1]:1", false);
        assert!(matches!(lost, Cause::PeerLost { .. }));
        let late = Cause::from_message("Timed out waiting 5000ms for recv operation", false);
        assert!(matches!(late, Cause::Timeout(_)));
        assert_eq!(
            Cause::from_message("Connection closed by peer", true),
            Cause::Aborted
        );
    }

    #[test]
    fn nccl_messages_are_classified() {
        let lost = "NCCL error in: NCCLUtils.cpp:87, remote process exited or there was a network error, NCCL version \
                    2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting \
                    prematurely.";
        assert!(matches!(
            Cause::from_message(lost, false),
            Cause::PeerLost { .. }
        ));
        let late = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, \
                    NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600005 milliseconds before timing out.";
        assert!(matches!(
            Cause::from_message(late, false),
            Cause::Timeout(_)
        ));
        let other = "NCCL error in: NCCLUtils.cpp:87, unhandled cuda error, NCCL version 2.27.5";
        assert!(matches!(
            Cause::from_message(other, false),
            Cause::Backend(_)
        ));
    }
}

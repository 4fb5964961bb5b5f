//! What can go wrong, with who, what and what to do.

use std::fmt;

use trainyard_trace::CollectiveKind;

/// Result of everything in this crate.
pub type Result<T, E = TorchError> = std::result::Result<T, E>;

/// An error of libtorch, of a callback, or of communication.
#[derive(Debug, thiserror::Error)]
pub enum TorchError {
    /// A collective or a message failed.
    #[error(transparent)]
    Communication(#[from] Box<CommunicationError>),
    /// The group could not be formed.
    #[error("rank {rank} could not form group {group} ({backend}): {message}")]
    Forming {
        /// Global rank of this process.
        rank: usize,
        /// The axes of the group.
        group: String,
        /// `gloo` or `nccl`.
        backend: &'static str,
        /// The reason, and what to do.
        message: String,
    },
    /// A store operation failed.
    #[error("store {address}: {operation} {key:?}: {message}")]
    Store {
        /// Where the store is.
        address: String,
        /// `set`, `get`, ...
        operation: &'static str,
        /// The key it was about.
        key: String,
        /// libtorch's words.
        message: String,
    },
    /// A variable of the launcher's environment is missing or wrong.
    #[error("environment variable {name} {problem}: start ranks with `trainyard run` or torchrun")]
    Environment {
        /// Its name.
        name: &'static str,
        /// `is not set`, or what it holds instead of a number.
        problem: String,
    },
    /// A backward pass reached a custom function a second time.
    #[error(
        "backward through a function whose graph was released; keep the graph for a second pass"
    )]
    GraphReleased,
    /// A Rust callback panicked inside libtorch.
    #[error("{what} panicked: {message}")]
    Panicked {
        /// Which callback.
        what: &'static str,
        /// The panic's message.
        message: String,
    },
    /// Something was asked of the operands that they cannot do.
    #[error("{0}")]
    Invalid(String),
    /// The mesh has no such group or rank.
    #[error(transparent)]
    Mesh(#[from] trainyard_mesh::MeshError),
    /// libtorch threw.
    #[error("{0}")]
    Torch(String),
    /// An error of the caller's, raised inside a hook.
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

/// libtorch appends its C++ stack to every message; users act on the message only.
fn without_backtrace(message: &str) -> &str {
    let end = message
        .find("\nException raised from")
        .unwrap_or(message.len());
    message[..end].trim_end()
}

/// A collective that failed: who, which one, with whom, and why.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "rank {rank}: {kind} #{sequence} in group {group} of {group_size} ({operands}) failed: {cause}"
)]
pub struct CommunicationError {
    /// Global rank of this process.
    pub rank: usize,
    /// Which collective.
    pub kind: CollectiveKind,
    /// The group's name: its axes.
    pub group: String,
    /// Number of ranks in it.
    pub group_size: usize,
    /// Number of the collective in this group, from 0.
    pub sequence: u64,
    /// What was passed, shapes and types.
    pub operands: String,
    /// Why.
    pub cause: Cause,
}

/// Why a collective failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// Somebody did not come in time.
    Timeout(String),
    /// The connection to a peer is gone: that process died or left.
    PeerLost(String),
    /// This rank was told to leave ([`crate::Group::abort`]).
    Aborted,
    /// The operands do not fit the collective.
    Operands(String),
    /// Anything else, in the backend's words.
    Backend(String),
}

impl Cause {
    /// Reads Gloo's and NCCL's messages.
    pub(crate) fn from_message(message: &str, aborted: bool) -> Cause {
        let has = |words: &[&str]| words.iter().any(|w| message.contains(w));
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
        ]) {
            Cause::PeerLost(message.to_owned())
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
                "a peer did not take part in time ({m}); look for the rank that stopped earlier"
            ),
            Cause::PeerLost(m) => write!(
                f,
                "a peer is gone ({m}); the launcher names the rank that ended first"
            ),
            Cause::Aborted => write!(f, "this rank was told to leave the group"),
            Cause::Operands(m) => write!(f, "{m}"),
            Cause::Backend(m) => write!(f, "{m}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gloo_messages_are_told_apart() {
        let lost =
            Cause::from_message("[pair.cc:1] Connection closed by peer [127.0.0.1]:1", false);
        assert!(matches!(lost, Cause::PeerLost(_)));
        let late = Cause::from_message("Timed out waiting 5000ms for recv operation", false);
        assert!(matches!(late, Cause::Timeout(_)));
        assert_eq!(
            Cause::from_message("Connection closed by peer", true),
            Cause::Aborted
        );
    }
}

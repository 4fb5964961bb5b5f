//! Why the ranks of a job were started again.

use trainyard_launcher::{ExitStatus, Outcome};

/// The cause of a restart.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum RestartCause {
    /// A rank exited with an error.
    Exit,
    /// A signal killed a rank.
    Signal,
    /// The kernel's out-of-memory killer ended a rank.
    OutOfMemory,
    /// A rank made no progress.
    Hang,
    /// A rank of another node failed.
    OtherNode,
    /// No rank failed: nodes have come or gone.
    Membership,
}

impl RestartCause {
    /// All causes.
    pub const ALL: [RestartCause; 6] = [
        RestartCause::Exit,
        RestartCause::Signal,
        RestartCause::OutOfMemory,
        RestartCause::Hang,
        RestartCause::OtherNode,
        RestartCause::Membership,
    ];

    /// The cause of a restart after this outcome of this node's ranks. `is_failure` tells whether the restart counts as one
    /// after a failure.
    pub fn of(outcome: &Outcome, is_failure: bool) -> RestartCause {
        let is_first = |rank: usize| Some(rank) == outcome.first_failure;
        let Some(first) = outcome.exits.iter().find(|exit| is_first(exit.rank)) else {
            return if is_failure {
                RestartCause::OtherNode
            } else {
                RestartCause::Membership
            };
        };
        match first.status {
            _ if first.hang_reason.is_some() => RestartCause::Hang,
            _ if first.is_oom => RestartCause::OutOfMemory,
            ExitStatus::Exited(_) => RestartCause::Exit,
            ExitStatus::Signaled(_) => RestartCause::Signal,
        }
    }

    /// The value of the label `cause`.
    pub fn label(self) -> &'static str {
        match self {
            RestartCause::Exit => "exit",
            RestartCause::Signal => "signal",
            RestartCause::OutOfMemory => "out_of_memory",
            RestartCause::Hang => "hang",
            RestartCause::OtherNode => "other_node",
            RestartCause::Membership => "membership",
        }
    }
}

//! What is wrong with a schedule.

use crate::Task;

/// Why a schedule cannot be made or cannot run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// Numbers a schedule cannot be made for.
    #[error("{kind}: {reason}")]
    Shape {
        /// The schedule's name.
        kind: &'static str,
        /// What does not fit, and what would.
        reason: String,
    },

    /// A name of no schedule.
    #[error("there is no schedule {name:?}: {}", names.join(", "))]
    UnknownKind {
        /// The name.
        name: String,
        /// Those there are.
        names: Vec<&'static str>,
    },

    /// Text that is no action.
    #[error("{text:?} is no action: write stage, F, B, I or W, and micro-batch, as in 2F5")]
    Unreadable {
        /// The text.
        text: String,
    },

    /// A rank has work of a stage it does not hold.
    #[error("rank {rank} is to do {task}, but stage {} is rank {holder}'s", task.stage)]
    Misplaced {
        /// The rank.
        rank: usize,
        /// The work.
        task: Task,
        /// Who holds the stage.
        holder: usize,
    },

    /// Stages or micro-batches beyond those there are.
    #[error("{task} is outside of {num_stages} stages and {num_microbatches} micro-batches")]
    Outside {
        /// The work.
        task: Task,
        /// Stages.
        num_stages: usize,
        /// Micro-batches.
        num_microbatches: usize,
    },

    /// Work that is done twice.
    #[error("{task} is done twice")]
    Repeated {
        /// The work.
        task: Task,
    },

    /// Work that is not done.
    #[error("{task} is never done")]
    Missing {
        /// The work.
        task: Task,
    },

    /// Ranks that wait for each other.
    #[error("ranks wait for each other: {}", waiting.join("; "))]
    Deadlock {
        /// What each rank waits for.
        waiting: Vec<String>,
    },
}

//! Errors of pipeline schedules.

use crate::Task;

/// Why a schedule cannot be built or is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// The schedule does not support these numbers of ranks, stages or micro-batches.
    #[error("{kind}: {reason}")]
    InvalidShape {
        /// Name of the schedule.
        kind: &'static str,
        /// What is not supported, and what is.
        reason: String,
    },

    /// A name is not that of a schedule.
    #[error("{name:?} is not a pipeline schedule; the schedules are {}", names.join(", "))]
    UnknownKind {
        /// The unknown name.
        name: String,
        /// The names of all schedules.
        names: Vec<&'static str>,
    },

    /// A text is not an action.
    #[error(
        "{text:?} is not a schedule action; write stage, F, B, I or W, and micro-batch, as in 2F5"
    )]
    Parse {
        /// The text.
        text: String,
    },

    /// A rank has a task of a stage that belongs to another rank.
    #[error("rank {rank} has task {task}, but stage {} belongs to rank {owner}", task.stage)]
    WrongRank {
        /// The rank that has the task.
        rank: usize,
        /// The task.
        task: Task,
        /// The rank of the stage.
        owner: usize,
    },

    /// A task refers to a stage or micro-batch that does not exist.
    #[error(
        "task {task} is out of range for {num_stages} stages and {num_microbatches} micro-batches"
    )]
    OutOfRange {
        /// The task.
        task: Task,
        /// Number of stages.
        num_stages: usize,
        /// Number of micro-batches.
        num_microbatches: usize,
    },

    /// A task is scheduled twice.
    #[error("task {task} is scheduled twice")]
    Repeated {
        /// The task.
        task: Task,
    },

    /// A task is not scheduled.
    #[error("task {task} is missing")]
    Missing {
        /// The task.
        task: Task,
    },

    /// Ranks wait for each other.
    #[error("the schedule deadlocks: {}", waiting.join("; "))]
    Deadlock {
        /// The action at which each rank is blocked.
        waiting: Vec<String>,
    },
}

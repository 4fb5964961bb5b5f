//! Validation of schedules: completeness and freedom from deadlock.

use std::collections::HashSet;

use crate::{ComputeType, Costs, Schedule, ScheduleError, Task, simulate};

impl Schedule {
    /// Checks that every micro-batch runs one forward and one backward in every stage, on the rank of that
    /// stage, and that ranks do not deadlock.
    pub fn check(&self) -> Result<(), ScheduleError> {
        let mut done = HashSet::new();
        for (rank, task) in self.tasks() {
            let (num_stages, num_microbatches) = (self.num_stages(), self.num_microbatches);
            if task.stage >= num_stages || task.microbatch >= num_microbatches {
                return Err(ScheduleError::OutOfRange {
                    task,
                    num_stages,
                    num_microbatches,
                });
            }
            let owner = self.stage_to_rank[task.stage];
            if owner != rank {
                return Err(ScheduleError::WrongRank { rank, task, owner });
            }
            if !done.insert(task) {
                return Err(ScheduleError::Repeated { task });
            }
        }
        for stage in 0..self.num_stages() {
            for microbatch in 0..self.num_microbatches {
                check_complete(&done, stage, microbatch)?;
            }
        }
        simulate(self, &Costs::uniform(1.0, 1.0, 1.0)).map(drop)
    }
}

/// Checks that a micro-batch has a forward, and either a full backward or both of its parts.
fn check_complete(
    done: &HashSet<Task>,
    stage: usize,
    microbatch: usize,
) -> Result<(), ScheduleError> {
    let task = |compute_type| Task::new(stage, compute_type, microbatch);
    let has = |compute_type| done.contains(&task(compute_type));
    let missing = |compute_type| {
        Err(ScheduleError::Missing {
            task: task(compute_type),
        })
    };
    if !has(ComputeType::Forward) {
        return missing(ComputeType::Forward);
    }
    let full = has(ComputeType::Backward);
    let (input, weight) = (
        has(ComputeType::BackwardInput),
        has(ComputeType::BackwardWeight),
    );
    match (full, input, weight) {
        (true, false, false) | (false, true, true) => Ok(()),
        (true, true, _) => repeated(task(ComputeType::BackwardInput)),
        (true, _, true) => repeated(task(ComputeType::BackwardWeight)),
        (false, false, _) => missing(ComputeType::Backward),
        (false, true, false) => missing(ComputeType::BackwardWeight),
    }
}

fn repeated(task: Task) -> Result<(), ScheduleError> {
    Err(ScheduleError::Repeated { task })
}

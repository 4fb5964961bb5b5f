//! Whether a schedule is complete, and whether it can end.

use std::collections::HashSet;

use crate::{Costs, Schedule, ScheduleError, Task, Work, simulate};

impl Schedule {
    /// Every micro-batch goes once forward and once backward through every stage, at the rank that
    /// holds it, and no ranks wait for each other.
    pub fn check(&self) -> Result<(), ScheduleError> {
        let mut done = HashSet::new();
        for (rank, task) in self.tasks() {
            let (num_stages, num_microbatches) = (self.num_stages(), self.num_microbatches);
            if task.stage >= num_stages || task.microbatch >= num_microbatches {
                return Err(ScheduleError::Outside {
                    task,
                    num_stages,
                    num_microbatches,
                });
            }
            let holder = self.holders[task.stage];
            if holder != rank {
                return Err(ScheduleError::Misplaced { rank, task, holder });
            }
            if !done.insert(task) {
                return Err(ScheduleError::Repeated { task });
            }
        }
        for stage in 0..self.num_stages() {
            for microbatch in 0..self.num_microbatches {
                complete(&done, stage, microbatch)?;
            }
        }
        simulate(self, &Costs::uniform(1.0, 1.0, 1.0)).map(drop)
    }
}

/// Forward, and backward whole or in both its parts.
fn complete(done: &HashSet<Task>, stage: usize, microbatch: usize) -> Result<(), ScheduleError> {
    let task = |work| Task::new(stage, work, microbatch);
    let has = |work| done.contains(&task(work));
    let missing = |work| Err(ScheduleError::Missing { task: task(work) });
    if !has(Work::Forward) {
        return missing(Work::Forward);
    }
    let whole = has(Work::Backward);
    let (input, weight) = (has(Work::BackwardInput), has(Work::BackwardWeight));
    match (whole, input, weight) {
        (true, false, false) | (false, true, true) => Ok(()),
        (true, true, _) => repeated(task(Work::BackwardInput)),
        (true, _, true) => repeated(task(Work::BackwardWeight)),
        (false, false, _) => missing(Work::Backward),
        (false, true, false) => missing(Work::BackwardWeight),
    }
}

fn repeated(task: Task) -> Result<(), ScheduleError> {
    Err(ScheduleError::Repeated { task })
}

//! Schedules from and to files: a line per rank, an action per cell, as PyTorch writes them.

use crate::{Action, Schedule, ScheduleError, Task, Work};

impl Schedule {
    /// Reads a schedule and checks it. Empty cells are pauses, which follow from the order anyway; a
    /// stage is the rank's that takes its first micro-batch forward.
    pub fn from_csv(text: &str) -> Result<Schedule, ScheduleError> {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let ranks = lines
            .map(|line| {
                let cells = line.split(',').map(str::trim);
                let actions = cells.filter(|cell| !cell.is_empty());
                actions.map(str::parse).collect()
            })
            .collect::<Result<Vec<Vec<Action>>, _>>()?;
        Schedule::of_actions(ranks)
    }

    /// A schedule of these actions, checked.
    pub(crate) fn of_actions(ranks: Vec<Vec<Action>>) -> Result<Schedule, ScheduleError> {
        let mut schedule = Schedule {
            num_microbatches: 0,
            holders: Vec::new(),
            ranks,
        };
        let tasks: Vec<(usize, Task)> = schedule.tasks().collect();
        // A stage needs tasks of its own, so there cannot be more of either than there are tasks.
        let outermost = |of: fn(&Task) -> usize| {
            let largest = tasks.iter().map(|(_, task)| of(task)).max();
            largest
                .map_or(0, |largest| largest.saturating_add(1))
                .min(tasks.len())
        };
        schedule.num_microbatches = outermost(|task| task.microbatch);
        schedule.holders = vec![0; outermost(|task| task.stage)];
        for (rank, task) in tasks {
            if task.work == Work::Forward
                && task.microbatch == 0
                && task.stage < schedule.holders.len()
            {
                schedule.holders[task.stage] = rank;
            }
        }
        schedule.check()?;
        Ok(schedule)
    }

    /// The same, written.
    pub fn to_csv(&self) -> String {
        let line = |actions: &Vec<Action>| {
            let cells: Vec<String> = actions.iter().map(Action::to_string).collect();
            cells.join(",") + "\n"
        };
        self.ranks.iter().map(line).collect()
    }
}

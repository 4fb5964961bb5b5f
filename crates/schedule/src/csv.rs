//! Schedules as CSV in PyTorch's format: one line per rank, one action per cell.

use crate::{Action, ComputeType, Schedule, ScheduleError, Task};

impl Schedule {
    /// Parses and checks a schedule. Empty cells, which mark idle time, are ignored. A stage belongs to the rank
    /// that runs its first forward.
    pub fn from_csv(text: &str) -> Result<Schedule, ScheduleError> {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let ranks = lines
            .map(|line| {
                let cells = line.split(',').map(str::trim);
                let actions = cells.filter(|cell| !cell.is_empty());
                actions.map(str::parse).collect()
            })
            .collect::<Result<Vec<Vec<Action>>, _>>()?;
        Schedule::from_actions(ranks)
    }

    /// Builds and checks a schedule from the actions of every rank.
    pub(crate) fn from_actions(ranks: Vec<Vec<Action>>) -> Result<Schedule, ScheduleError> {
        let mut schedule = Schedule {
            num_microbatches: 0,
            stage_to_rank: Vec::new(),
            ranks,
        };
        let tasks: Vec<(usize, Task)> = schedule.tasks().collect();
        // Bounded by the number of tasks, so that absurd indices do not allocate memory: every stage and every
        // micro-batch needs tasks of its own.
        let count = |of: fn(&Task) -> usize| {
            let largest = tasks.iter().map(|(_, task)| of(task)).max();
            largest
                .map_or(0, |largest| largest.saturating_add(1))
                .min(tasks.len())
        };
        schedule.num_microbatches = count(|task| task.microbatch);
        schedule.stage_to_rank = vec![0; count(|task| task.stage)];
        for (rank, task) in tasks {
            if task.compute_type == ComputeType::Forward
                && task.microbatch == 0
                && task.stage < schedule.stage_to_rank.len()
            {
                schedule.stage_to_rank[task.stage] = rank;
            }
        }
        schedule.check()?;
        Ok(schedule)
    }

    /// Writes the schedule in the format that [`Schedule::from_csv`] reads.
    pub fn to_csv(&self) -> String {
        let line = |actions: &Vec<Action>| {
            let cells: Vec<String> = actions.iter().map(Action::to_string).collect();
            cells.join(",") + "\n"
        };
        self.ranks.iter().map(line).collect()
    }
}

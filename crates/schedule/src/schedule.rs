//! Pipeline schedules: an ordered list of actions per rank.

use crate::{Action, Task};

/// The actions of every rank of a pipeline, in order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Schedule {
    /// Micro-batches per step.
    pub num_microbatches: usize,
    /// The rank of each stage, as PyTorch's `stage_index_to_group_rank`.
    pub stage_to_rank: Vec<usize>,
    /// The actions of each rank.
    pub ranks: Vec<Vec<Action>>,
}

impl Schedule {
    /// Number of pipeline ranks.
    pub fn num_ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Number of stages of the model.
    pub fn num_stages(&self) -> usize {
        self.stage_to_rank.len()
    }

    /// The stages of `rank`, in order.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        let own = (0..self.num_stages()).filter(|&stage| self.stage_to_rank[stage] == rank);
        own.collect()
    }

    /// The tasks of all ranks, with the rank; those of each rank in order.
    pub fn tasks(&self) -> impl Iterator<Item = (usize, Task)> {
        let ranks = self.ranks.iter().enumerate();
        ranks.flat_map(|(rank, actions)| {
            let tasks = actions.iter().flat_map(Action::tasks);
            tasks.map(move |task| (rank, task))
        })
    }

    /// Drops the micro-batches from `num_microbatches` on. The remaining tasks depend on none of the dropped ones,
    /// so a schedule without deadlock stays free of it.
    #[must_use]
    pub(crate) fn with_microbatches(mut self, num_microbatches: usize) -> Schedule {
        let keeps = |task: &Task| task.microbatch < num_microbatches;
        for actions in &mut self.ranks {
            let kept = actions.iter().filter_map(|action| {
                let mut tasks = action.tasks().filter(keeps);
                match (tasks.next(), tasks.next()) {
                    (Some(first), Some(second)) => Some(Action::Overlapped(first, second)),
                    (Some(only), None) => Some(Action::Single(only)),
                    _ => None,
                }
            });
            *actions = kept.collect();
        }
        self.num_microbatches = num_microbatches;
        self
    }
}

//! A schedule: a list of actions for every rank.

use crate::{Action, Task};

/// What every rank does, in order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Schedule {
    /// Micro-batches of a step.
    pub num_microbatches: usize,
    /// Which rank holds each stage.
    pub holders: Vec<usize>,
    /// The actions of each rank.
    pub ranks: Vec<Vec<Action>>,
}

impl Schedule {
    /// Ranks.
    pub fn num_ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Stages of the model.
    pub fn num_stages(&self) -> usize {
        self.holders.len()
    }

    /// The stages of `rank`, in order.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        let own = (0..self.num_stages()).filter(|&stage| self.holders[stage] == rank);
        own.collect()
    }

    /// All work of all ranks, each rank's in order.
    pub fn tasks(&self) -> impl Iterator<Item = (usize, Task)> {
        let ranks = self.ranks.iter().enumerate();
        ranks.flat_map(|(rank, actions)| {
            let tasks = actions.iter().flat_map(Action::tasks);
            tasks.map(move |task| (rank, task))
        })
    }

    /// Without the micro-batches from `num_microbatches` on. What is left waits for nothing that is
    /// gone, so a schedule that could end still can.
    #[must_use]
    pub(crate) fn truncated(mut self, num_microbatches: usize) -> Schedule {
        let keeps = |task: &Task| task.microbatch < num_microbatches;
        for actions in &mut self.ranks {
            let kept = actions.iter().filter_map(|action| {
                let mut tasks = action.tasks().filter(keeps);
                match (tasks.next(), tasks.next()) {
                    (Some(first), Some(second)) => Some(Action::Both(first, second)),
                    (Some(only), None) => Some(Action::One(only)),
                    _ => None,
                }
            });
            *actions = kept.collect();
        }
        self.num_microbatches = num_microbatches;
        self
    }
}

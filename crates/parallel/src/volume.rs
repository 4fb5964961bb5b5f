//! What a strategy sends in a step and holds between steps, by formula.
//!
//! Written from the strategy's definition, not from its code: `verify` and the tests compare what
//! the ledger and the allocator counted with this.

use std::iter::Sum;

use serde::Serialize;

use crate::strategy::Passes;
use crate::zero::{Reshard, Stage};

/// Bytes of one step: handed in by one rank, and sent by all ranks together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Volume {
    /// Of gradients, as one rank hands them to the collectives that reduce them.
    pub reduced: u64,
    /// Of gradients, sent.
    pub gradients: u64,
    /// Of parameters, sent.
    pub parameters: u64,
}

/// Of whole gradients of `bytes`, reduced once over `num_ranks`: every rank's part to its owner, and
/// the sum back.
pub fn replicated_volume(bytes: u64, num_ranks: usize) -> Volume {
    Volume {
        reduced: bytes,
        gradients: 2 * (num_ranks as u64 - 1) * bytes,
        parameters: 0,
    }
}

/// Gradients that several ranks hold a term of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TermBytes {
    /// What this rank hands in.
    pub held: u64,
    /// What all ranks that share one copy of the parameters hand in, each once.
    pub all: u64,
    /// How many ranks add up.
    pub num_ranks: u64,
}

impl Volume {
    /// The same for `num_families` sets of ranks that each do this among themselves.
    #[must_use]
    pub fn times(self, num_families: usize) -> Volume {
        let times = num_families as u64;
        Volume {
            reduced: self.reduced,
            gradients: times * self.gradients,
            parameters: times * self.parameters,
        }
    }

    /// With terms that are added up, of `num_copies` copies of the parameters.
    #[must_use]
    pub fn with_terms(mut self, terms: &[TermBytes], num_copies: usize) -> Volume {
        for term in terms {
            self.reduced += term.held;
            self.gradients += num_copies as u64 * 2 * (term.num_ranks - 1) * term.all;
        }
        self
    }
}

impl Sum for Volume {
    fn sum<I: Iterator<Item = Volume>>(volumes: I) -> Volume {
        volumes.fold(Volume::default(), |sum, volume| Volume {
            reduced: sum.reduced + volume.reduced,
            gradients: sum.gradients + volume.gradients,
            parameters: sum.parameters + volume.parameters,
        })
    }
}

impl Sum for StateBytes {
    fn sum<I: Iterator<Item = StateBytes>>(states: I) -> StateBytes {
        states.fold(StateBytes::default(), |sum, state| StateBytes {
            parameters: sum.parameters + state.parameters,
            gradients: sum.gradients + state.gradients,
            optimizer: sum.optimizer + state.optimizer,
        })
    }
}

/// A sharded model, as far as the formulas need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardedModel {
    /// What is sharded.
    pub stage: Stage,
    /// Whether parameters go after forward.
    pub reshard: Reshard,
    /// Elements of every unit's row, padding included.
    pub rows: Vec<u64>,
    /// Elements this rank holds of parameters, without padding: what the optimiser keeps moments of.
    pub num_held: u64,
    /// Units that lend parameters, and so keep theirs until backward.
    pub lent: Vec<bool>,
    /// Ranks that share one copy.
    pub num_shards: usize,
    /// Copies.
    pub num_replicas: usize,
    /// Bytes of an element of the master weights, of parameters as they travel, of gradients as they
    /// travel.
    pub widths: Widths,
}

/// Bytes per element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Widths {
    /// Of master weights and the optimiser's states.
    pub master: u64,
    /// Of parameters as layers compute with them.
    pub param: u64,
    /// Of gradients as they are reduced.
    pub reduce: u64,
}

/// Bytes one rank holds between steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct StateBytes {
    /// Parameters in the type layers compute in.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Master weights, where they are not the parameters themselves, and the optimiser's moments.
    pub optimizer: u64,
}

impl ShardedModel {
    /// What all ranks send in a step of such passes.
    pub fn volume(&self, passes: Passes) -> Volume {
        let (shards, replicas) = (self.num_shards as u64, self.num_replicas as u64);
        let mut volume = Volume::default();
        for (index, &elements) in self.rows.iter().enumerate() {
            // A reduce-scatter or an all-gather of a row: every rank sends all but one chunk.
            let once = replicas * (shards - 1) * elements;
            let num_reductions = match self.stage {
                Stage::OptimizerStates => 1,
                _ => passes.num_reductions,
            };
            let copies_meet = 2 * (replicas - 1) * elements;
            let shard = if replicas > 1 { elements / shards } else { 0 };
            // Where one rank has all shards there is nothing to hand in.
            let row = if shards > 1 { elements } else { 0 };
            volume.reduced += (num_reductions * row + shard) * self.widths.reduce;
            volume.gradients += (num_reductions * once + copies_meet) * self.widths.reduce;
            let num_gathers = match self.stage {
                Stage::Parameters => passes
                    .num_gathers
                    .unwrap_or(passes.num_microbatches * self.gathers_per_pass(index)),
                _ => 1,
            };
            volume.parameters += num_gathers * once * self.widths.param;
        }
        volume
    }

    fn gathers_per_pass(&self, index: usize) -> u64 {
        let is_last = index + 1 == self.rows.len();
        let stays = match self.reshard {
            Reshard::Default => is_last,
            Reshard::Always => false,
            Reshard::Never => true,
        };
        if stays || self.lent[index] { 1 } else { 2 }
    }

    /// What a rank holds between steps, with `num_moments` states per master weight.
    pub fn states(&self, num_moments: u64) -> StateBytes {
        let elements: u64 = self.rows.iter().sum();
        let shard = elements / self.num_shards as u64;
        let Widths {
            master,
            param,
            reduce,
        } = self.widths;
        let has_master = u64::from(master != param);
        let (parameters, gradients) = match self.stage {
            Stage::OptimizerStates if param == reduce => (elements * param, elements * param),
            Stage::OptimizerStates => (elements * param, elements * param + shard * reduce),
            Stage::Gradients => (elements * param, shard * reduce),
            Stage::Parameters => (shard * param, shard * reduce),
        };
        StateBytes {
            parameters,
            gradients,
            optimizer: master * (has_master * shard + num_moments * self.num_held),
        }
    }
}

impl StateBytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(stage: Stage, num_shards: usize) -> ShardedModel {
        ShardedModel {
            stage,
            reshard: Reshard::Always,
            rows: vec![8, 16],
            num_held: 24 / num_shards as u64,
            lent: vec![false; 2],
            num_shards,
            num_replicas: 1,
            widths: Widths {
                master: 4,
                param: 2,
                reduce: 2,
            },
        }
    }

    /// ZeRO's own table: 4 + 12/N, 2 + 14/N, 16/N bytes per parameter.
    #[test]
    fn states_are_those_of_the_paper() {
        let per_parameter = |stage| model(stage, 4).states(2).total() as f64 / 24.0;
        assert_eq!(per_parameter(Stage::OptimizerStates), 4.0 + 12.0 / 4.0);
        assert_eq!(per_parameter(Stage::Gradients), 2.0 + 14.0 / 4.0);
        assert_eq!(per_parameter(Stage::Parameters), 16.0 / 4.0);
    }

    /// 2P and 3P, times (N - 1)/N, sent by each of N ranks.
    #[test]
    fn volumes_are_those_of_the_paper() {
        let sent = |stage| {
            let volume = model(stage, 4).volume(Passes::each(1));
            (volume.gradients + volume.parameters) as f64 / 4.0 / (2.0 * 24.0)
        };
        assert_eq!(sent(Stage::OptimizerStates), 2.0 * 3.0 / 4.0);
        assert_eq!(sent(Stage::Gradients), 2.0 * 3.0 / 4.0);
        assert_eq!(sent(Stage::Parameters), 3.0 * 3.0 / 4.0);
    }
}

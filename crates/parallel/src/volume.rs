//! Communication volume and memory of a strategy, by formula.
//!
//! The formulas follow from the definition of the strategy, not from its code. `verify` and the tests compare them
//! with what the ledger and the allocator measured.

use std::iter::Sum;

use serde::Serialize;

use crate::strategy::CommCounts;
use crate::zero::{Reshard, Stage};

/// Bytes communicated in one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Volume {
    /// Gradient bytes that one rank passes to reducing collectives.
    pub reduced: u64,
    /// Gradient bytes that all ranks together send.
    pub gradients: u64,
    /// Parameter bytes that all ranks together send.
    pub parameters: u64,
}

/// The volume of one all-reduce of `bytes` of gradients over `num_ranks`: a reduce-scatter and an all-gather.
pub fn replicated_volume(bytes: u64, num_ranks: usize) -> Volume {
    Volume {
        reduced: bytes,
        gradients: 2 * (num_ranks as u64 - 1) * bytes,
        parameters: 0,
    }
}

/// Sizes of gradients with a partial placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartialGradBytes {
    /// Bytes that this rank holds.
    pub local: u64,
    /// Bytes of the full parameters, over all ranks that shard one replica.
    pub full: u64,
    /// Number of ranks that hold partial sums of the same gradient.
    pub num_ranks: u64,
}

impl Volume {
    /// The volume of `num_groups` groups that each do the same.
    #[must_use]
    pub fn times(self, num_groups: usize) -> Volume {
        let times = num_groups as u64;
        Volume {
            reduced: self.reduced,
            gradients: times * self.gradients,
            parameters: times * self.parameters,
        }
    }

    /// Adds the all-reduce of partial gradients, with `num_replicas` replicas of the parameters.
    #[must_use]
    pub fn with_partial_grads(
        mut self,
        partial: &[PartialGradBytes],
        num_replicas: usize,
    ) -> Volume {
        for bytes in partial {
            self.reduced += bytes.local;
            self.gradients += num_replicas as u64 * 2 * (bytes.num_ranks - 1) * bytes.full;
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

/// The properties of a sharded model that the formulas depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardedModel {
    /// The ZeRO stage.
    pub stage: Stage,
    /// Whether parameters are released after forward.
    pub reshard: Reshard,
    /// Elements of every unit's flat parameter, padding included.
    pub flat_sizes: Vec<u64>,
    /// Whether other units use a unit's parameters too, so that they stay gathered until backward.
    pub shared: Vec<bool>,
    /// Number of ranks that shard one replica.
    pub num_shards: usize,
    /// Number of replicas.
    pub num_replicas: usize,
    /// Bytes per element.
    pub widths: Widths,
}

/// Bytes per element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Widths {
    /// Of master weights and optimizer states.
    pub master: u64,
    /// Of parameters in computation and all-gathers.
    pub param: u64,
    /// Of gradients in reductions.
    pub reduce: u64,
}

/// Bytes that one rank holds between steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct StateBytes {
    /// Parameters in the type of computation.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Master weights, if they are not the parameters themselves, and the optimizer's moments.
    pub optimizer: u64,
}

impl ShardedModel {
    /// The communication volume of a step.
    pub fn volume(&self, counts: CommCounts) -> Volume {
        let (shards, replicas) = (self.num_shards as u64, self.num_replicas as u64);
        let mut volume = Volume::default();
        for (index, &elements) in self.flat_sizes.iter().enumerate() {
            // In a reduce-scatter or an all-gather, every rank sends all but one chunk.
            let once = replicas * (shards - 1) * elements;
            let num_reductions = match self.stage {
                Stage::OptimizerStates => 1,
                _ => counts.num_reductions,
            };
            let all_reduce = 2 * (replicas - 1) * elements;
            let shard = if replicas > 1 { elements / shards } else { 0 };
            // With one shard there is no reduce-scatter.
            let flat = if shards > 1 { elements } else { 0 };
            volume.reduced += (num_reductions * flat + shard) * self.widths.reduce;
            volume.gradients += (num_reductions * once + all_reduce) * self.widths.reduce;
            let num_gathers = match self.stage {
                Stage::Parameters => counts
                    .num_gathers
                    .unwrap_or(counts.num_microbatches * self.gathers_per_pass(index)),
                _ => 1,
            };
            volume.parameters += num_gathers * once * self.widths.param;
        }
        volume
    }

    fn gathers_per_pass(&self, index: usize) -> u64 {
        let is_last = index + 1 == self.flat_sizes.len();
        let stays = match self.reshard {
            Reshard::Default => is_last,
            Reshard::Always => false,
            Reshard::Never => true,
        };
        if stays || self.shared[index] { 1 } else { 2 }
    }

    /// The bytes that a rank holds between steps, without the optimizer's state tensors.
    pub fn states(&self) -> StateBytes {
        let elements: u64 = self.flat_sizes.iter().sum();
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
            optimizer: master * has_master * shard,
        }
    }
}

impl StateBytes {
    /// The sum of all states.
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
            flat_sizes: vec![8, 16],
            shared: vec![false; 2],
            num_shards,
            num_replicas: 1,
            widths: Widths {
                master: 4,
                param: 2,
                reduce: 2,
            },
        }
    }

    /// The table of the ZeRO paper: 4 + 12/N, 2 + 14/N, 16/N bytes per parameter.
    #[test]
    fn states_match_the_zero_paper() {
        // With two moments of four bytes for each of a rank's parameters.
        let moments = 2 * 4 * (24 / 4);
        let per_parameter = |stage| (model(stage, 4).states().total() + moments) as f64 / 24.0;
        assert_eq!(per_parameter(Stage::OptimizerStates), 4.0 + 12.0 / 4.0);
        assert_eq!(per_parameter(Stage::Gradients), 2.0 + 14.0 / 4.0);
        assert_eq!(per_parameter(Stage::Parameters), 16.0 / 4.0);
    }

    /// 2P and 3P, times (N - 1)/N, sent by each of N ranks.
    #[test]
    fn volumes_match_the_zero_paper() {
        let sent = |stage| {
            let volume = model(stage, 4).volume(CommCounts::per_microbatch(1));
            (volume.gradients + volume.parameters) as f64 / 4.0 / (2.0 * 24.0)
        };
        assert_eq!(sent(Stage::OptimizerStates), 2.0 * 3.0 / 4.0);
        assert_eq!(sent(Stage::Gradients), 2.0 * 3.0 / 4.0);
        assert_eq!(sent(Stage::Parameters), 3.0 * 3.0 / 4.0);
    }
}

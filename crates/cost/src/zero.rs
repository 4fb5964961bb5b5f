//! ZeRO: which states are sharded, and what a sharded model sends and holds.

use crate::{CommCounts, Encoding, ShardedElements, StateBytes, StateWidths, Volume};

/// The ZeRO stage: what is sharded. Each stage also shards what the stages before it do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Stage 1: optimizer states, master weights included.
    OptimizerStates,
    /// Stage 2: gradients too.
    Gradients,
    /// Stage 3: parameters too.
    #[default]
    Parameters,
}

impl Stage {
    /// The stage with this number; none for 0, which shards nothing.
    pub fn numbered(number: usize) -> Option<Stage> {
        match number {
            0 => None,
            1 => Some(Stage::OptimizerStates),
            2 => Some(Stage::Gradients),
            _ => Some(Stage::Parameters),
        }
    }
}

/// Whether parameters are released after forward, as torchtitan's `fsdp_reshard_after_forward`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reshard {
    /// Releases those of all units but the last, which backward needs at once.
    #[default]
    Default,
    /// Releases those of all units.
    Always,
    /// Releases none: they are gathered once per step and stay until backward has used them.
    Never,
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
    /// Bytes per element in memory.
    pub widths: Widths,
    /// How parameters are sent.
    pub gathered: Encoding,
    /// How gradients are sent.
    pub reduced: Encoding,
    /// The number of ranks that share a second copy of the parameters, from which all gathers of a step but the first are
    /// served.
    pub num_secondary_shards: Option<usize>,
}

/// Bytes per element in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Widths {
    /// Of master weights and optimizer states.
    pub master: u64,
    /// Of parameters in computation.
    pub param: u64,
    /// Of reduced gradients.
    pub reduce: u64,
}

impl ShardedModel {
    /// The communication volume of a step.
    pub fn volume(&self, counts: CommCounts) -> Volume {
        let (shards, replicas) = (self.num_shards as u64, self.num_replicas as u64);
        let mut volume = Volume::default();
        for (index, &elements) in self.flat_sizes.iter().enumerate() {
            let chunk = elements / shards;
            // In a reduce-scatter or an all-gather, every rank sends all but one chunk.
            let num_sent = replicas * shards * (shards - 1);
            let num_reductions = match self.stage {
                Stage::OptimizerStates => 1,
                _ => counts.num_reductions,
            };
            // With one shard there is no reduce-scatter.
            let num_chunks = if shards > 1 { shards } else { 0 };
            let reduced = num_reductions * self.reduced.bytes(chunk);
            volume.reduced += num_chunks * reduced;
            volume.gradients += num_sent * reduced;
            if replicas > 1 {
                let all_reduce = self.reduced.all_reduce_volume(chunk, self.num_replicas);
                volume.reduced += all_reduce.reduced;
                volume.gradients += shards * all_reduce.gradients;
            }
            let num_gathers = match self.stage {
                Stage::Parameters => counts
                    .num_gathers
                    .unwrap_or(counts.num_microbatches * self.gathers_per_pass(index)),
                _ => 1,
            };
            let first = num_sent * self.gathered.bytes(chunk);
            volume.parameters += match self.num_secondary_shards {
                None => num_gathers * first,
                Some(secondary) => {
                    let sent = shards * (secondary as u64 - 1) * (elements / secondary as u64);
                    first + (num_gathers - 1) * sent * self.widths.param
                }
            };
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
        let Widths {
            master,
            param,
            reduce,
        } = self.widths;
        let mut states = StateBytes::of(
            Some(self.stage),
            ShardedElements {
                full: elements,
                shard: elements / self.num_shards as u64,
            },
            StateWidths {
                parameter: param,
                gradient: param,
                reduced: reduce,
                optimizer: if master == param { 0 } else { master },
            },
        );
        let secondary = self.num_secondary_shards.map(|n| elements / n as u64);
        states.parameters += secondary.unwrap_or(0) * param;
        states
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
            gathered: Encoding::Plain(2),
            reduced: Encoding::Plain(2),
            num_secondary_shards: None,
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

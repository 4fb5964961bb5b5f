//! Memory of parameters, gradients and optimizer states on a rank.

use crate::{Offload, RankLayers, Strategy, Synchronization};
use trainyard_arch::{BlockKind, BlockParameters, DecoderConfig};
use trainyard_cost::{OUTER_WIDTH, ShardedElements, Stage, StateBytes, StateWidths};

/// The parameters of a rank, before data-parallel sharding.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct LocalParameters {
    /// Number of non-expert parameters.
    pub dense: f64,
    /// Number of expert parameters.
    pub experts: f64,
}

impl LocalParameters {
    /// The parameters of a rank with these layers.
    pub fn of(
        shape: &DecoderConfig,
        strategy: &Strategy,
        rank_layers: &RankLayers,
    ) -> LocalParameters {
        let mut sum = LocalParameters::default();
        for (count, unit) in units(shape, strategy, rank_layers) {
            sum.dense += count * unit.dense;
            sum.experts += count * unit.experts;
        }
        sum
    }

    /// The parameters of a block of this kind.
    pub(crate) fn of_block(
        shape: &DecoderConfig,
        strategy: &Strategy,
        kind: BlockKind,
    ) -> LocalParameters {
        let (tp, ep) = (strategy.degrees.tp as f64, strategy.degrees.ep as f64);
        let parameters: BlockParameters = shape.block(kind);
        LocalParameters {
            dense: parameters.sharded as f64 / tp + parameters.replicated as f64,
            experts: parameters.experts as f64 / ep,
        }
    }

    /// The parameters of the output head, tied or not.
    pub(crate) fn of_head(shape: &DecoderConfig, strategy: &Strategy) -> LocalParameters {
        LocalParameters {
            dense: shape.embedding() as f64 / strategy.degrees.tp as f64,
            experts: 0.0,
        }
    }

    /// All of them.
    pub(crate) const fn total(&self) -> f64 {
        self.dense + self.experts
    }

    /// The parameters that the rank keeps between steps: its shards, if stage 3 shards them.
    pub(crate) fn held(&self, strategy: &Strategy) -> u64 {
        let degrees = &strategy.degrees;
        let held = |parameters: f64, ranks: usize| {
            let (parameters, ranks) = (parameters.ceil() as u64, ranks.max(1) as u64);
            match Stage::numbered(strategy.zero_stage) {
                Some(Stage::Parameters) => parameters.div_ceil(ranks),
                _ => parameters,
            }
        };
        held(self.dense, degrees.dp_shard * degrees.cp) + held(self.experts, degrees.expert_shard())
    }
}

/// The units that are gathered and sharded together (blocks, embedding and head), each with its count.
fn units(
    shape: &DecoderConfig,
    strategy: &Strategy,
    rank_layers: &RankLayers,
) -> [(f64, LocalParameters); 4] {
    let tp = strategy.degrees.tp as f64;
    let vocab = shape.embedding() as f64 / tp;
    let block = |kind| LocalParameters::of_block(shape, strategy, kind);
    let end = |dense| LocalParameters {
        dense,
        experts: 0.0,
    };
    // A tied head shares the embedding's table unless the pipeline separates them.
    let is_tied = shape.tie_word_embeddings && rank_layers.has_embedding;
    let head_vocab = if is_tied { 0.0 } else { vocab };
    let one_if = |has| if has { 1.0 } else { 0.0 };
    [
        (rank_layers.num_dense as f64, block(BlockKind::Dense)),
        (rank_layers.num_sparse as f64, block(BlockKind::Experts)),
        (
            one_if(rank_layers.has_embedding),
            end(vocab + shape.position_table() as f64),
        ),
        (
            one_if(rank_layers.has_head),
            end(shape.norm_parameters() as f64 + head_vocab),
        ),
    ]
}

/// Bytes of the model states on a rank.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct States {
    /// Parameters.
    pub parameters: f64,
    /// Gradients.
    pub gradients: f64,
    /// Optimizer states, including master weights.
    pub optimizer: f64,
    /// Parameters that are gathered for use at the moment, if they are sharded.
    pub gathered: f64,
    /// What local updates keep for their outer steps, and what compression has not sent yet.
    pub outer: f64,
    /// Bytes that are offloaded to host memory or disk instead.
    pub offloaded: f64,
}

impl States {
    /// Bytes in device memory.
    pub const fn on_device(&self) -> f64 {
        self.parameters + self.gradients + self.optimizer + self.gathered + self.outer
    }

    /// The model states that a rank with these layers keeps between steps.
    pub fn of(shape: &DecoderConfig, strategy: &Strategy, rank_layers: &RankLayers) -> States {
        let degrees = &strategy.degrees;
        let mut sum = States::default();
        for (count, local) in units(shape, strategy, rank_layers) {
            let dense = states(strategy, local.dense, degrees.dp_shard * degrees.cp);
            let experts = states(strategy, local.experts, degrees.expert_shard());
            let both: StateBytes = [dense, experts].into_iter().sum();
            sum.parameters += count * both.parameters as f64;
            sum.gradients += count * both.gradients as f64;
            sum.optimizer += count * both.optimizer as f64;
            sum.outer += count * outer(strategy, local.held(strategy));
        }
        if let Synchronization::ParameterServer { .. } = strategy.synchronization {
            // Servers hold the optimizer states.
            sum.optimizer = 0.0;
        }
        if strategy.offload != Offload::None {
            sum.offloaded = sum.parameters + sum.optimizer;
            (sum.parameters, sum.optimizer) = (0.0, 0.0);
        }
        sum
    }
}

/// The states of `parameters` parameters, sharded over `ranks` ranks according to the ZeRO stage. Shards have equal
/// sizes, padded if necessary.
fn states(strategy: &Strategy, parameters: f64, ranks: usize) -> StateBytes {
    let (parameters, ranks) = (parameters.ceil() as u64, ranks.max(1) as u64);
    let stage = Stage::numbered(strategy.zero_stage);
    let shard = parameters.div_ceil(ranks);
    let precision = &strategy.precision;
    StateBytes::of(
        stage,
        ShardedElements {
            full: stage.map_or(parameters, |_| shard * ranks),
            shard,
        },
        StateWidths {
            parameter: precision.parameter as u64,
            gradient: precision.gradient as u64,
            reduced: precision.reduced as u64,
            optimizer: precision.optimizer as u64,
        },
    )
}

/// Bytes of outer steps and of error feedback for the parameters that a rank keeps.
fn outer(strategy: &Strategy, num_parameters: u64) -> f64 {
    let bytes = match &strategy.synchronization {
        Synchronization::LocalUpdates(local) => local.state_bytes(num_parameters),
        Synchronization::EveryStep(compression) if compression.keeps_errors() => {
            OUTER_WIDTH * num_parameters
        }
        _ => 0,
    };
    bytes as f64
}

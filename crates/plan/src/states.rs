//! What parameters, gradients and the optimiser take on a rank.

use crate::{BlockParameters, Holding, Offload, Shape, Strategy};

/// The parameters a rank computes with, before data-parallel ranks share them.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct LocalParameters {
    /// Of everything but experts.
    pub dense: f64,
    /// Of experts.
    pub experts: f64,
}

impl LocalParameters {
    /// Of a rank that holds these blocks.
    pub fn of(shape: &Shape, strategy: &Strategy, holding: &Holding) -> LocalParameters {
        let mut sum = LocalParameters::default();
        for (count, unit) in units(shape, strategy, holding) {
            sum.dense += count * unit.dense;
            sum.experts += count * unit.experts;
        }
        sum
    }
}

/// What a rank holds, by what is gathered and sharded together: blocks, the embedding and the head, each with
/// how many there are.
fn units(shape: &Shape, strategy: &Strategy, holding: &Holding) -> [(f64, LocalParameters); 4] {
    let tp = strategy.degrees.tp as f64;
    let ep = strategy.degrees.ep as f64;
    let words = shape.embedding() as f64 / tp;
    let block = |parameters: BlockParameters| LocalParameters {
        dense: parameters.shared as f64 / tp + parameters.whole as f64,
        experts: parameters.experts as f64 / ep,
    };
    let end = |dense| LocalParameters {
        dense,
        experts: 0.0,
    };
    // A tied head lies with the embedding, unless the pipeline parts them.
    let has_no_words = shape.tie_word_embeddings && holding.has_embedding;
    let head_words = if has_no_words { 0.0 } else { words };
    let one_if = |has| if has { 1.0 } else { 0.0 };
    [
        (holding.num_dense as f64, block(shape.dense_block())),
        (holding.num_sparse as f64, block(shape.expert_block())),
        (
            one_if(holding.has_embedding),
            end(words + shape.position_table() as f64),
        ),
        (
            one_if(holding.has_head),
            end(shape.norm() as f64 + head_words),
        ),
    ]
}

/// Bytes of the states on a rank.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct States {
    /// Parameters.
    pub parameters: f64,
    /// Gradients.
    pub gradients: f64,
    /// The optimiser's, with master copies.
    pub optimizer: f64,
    /// Whole for a moment, where they are sharded: parameters that layers use, and a gradient.
    pub gathered: f64,
    /// What lies in the machine's main memory or on its disks instead.
    pub offloaded: f64,
}

impl States {
    /// What lies in the accelerator's memory.
    pub const fn on_device(&self) -> f64 {
        self.parameters + self.gradients + self.optimizer + self.gathered
    }

    /// Of a rank that holds these blocks.
    pub fn of(shape: &Shape, strategy: &Strategy, holding: &Holding) -> States {
        let degrees = &strategy.degrees;
        let mut sum = States::default();
        for (count, local) in units(shape, strategy, holding) {
            let dense = states(strategy, local.dense, degrees.dp_shard * degrees.cp);
            let experts = states(strategy, local.experts, degrees.expert_shard());
            sum.parameters += count * (dense.parameters + experts.parameters);
            sum.gradients += count * (dense.gradients + experts.gradients);
            sum.optimizer += count * (dense.optimizer + experts.optimizer);
        }
        let is_offloaded = strategy.offload != Offload::None;
        if is_offloaded {
            sum.offloaded = sum.parameters + sum.optimizer;
            (sum.parameters, sum.optimizer) = (0.0, 0.0);
        }
        if strategy.zero_stage == 3 || is_offloaded {
            sum.gathered = gathered(shape, strategy, holding);
        }
        sum
    }
}

/// Of that many parameters, shared by that many ranks as far as the stage says. Shares are equal: what does
/// not divide is padded.
fn states(strategy: &Strategy, parameters: f64, ranks: usize) -> States {
    let precision = &strategy.precision;
    let ranks = ranks.max(1) as f64;
    let share = (parameters / ranks).ceil();
    let (whole, share) = match strategy.zero_stage {
        0 => (parameters, parameters),
        _ => (share * ranks, share),
    };
    let each = |bytes: usize, elements: f64| bytes as f64 * elements;
    let gradients = match strategy.zero_stage {
        0 => each(precision.gradient, whole),
        // What is reduced is a part of the whole, unless it has a type of its own.
        1 if precision.reduced == precision.gradient => each(precision.gradient, whole),
        1 => each(precision.gradient, whole) + each(precision.reduced, share),
        _ => each(precision.reduced, share),
    };
    let held = if strategy.zero_stage == 3 {
        share
    } else {
        whole
    };
    States {
        parameters: each(precision.parameter, held),
        gradients,
        optimizer: each(precision.optimizer, share),
        gathered: 0.0,
        offloaded: 0.0,
    }
}

/// One unit in use, one on its way and one's gradient: what PyTorch's planner of recomputation
/// budgets too.
fn gathered(shape: &Shape, strategy: &Strategy, holding: &Holding) -> f64 {
    let units = units(shape, strategy, holding).into_iter();
    let held = units.filter(|(count, _)| *count > 0.0);
    let largest = held
        .map(|(_, unit)| unit.dense + unit.experts)
        .fold(0.0, f64::max);
    3.0 * largest * strategy.precision.compute as f64
}

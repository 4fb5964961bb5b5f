//! What parameters, gradients and the optimiser take on a rank.

use crate::{Holding, Offload, Shape, Strategy};

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
        let tp = strategy.degrees.tp as f64;
        let ep = strategy.degrees.ep as f64;
        let (plain, sparse) = (shape.dense_block(), shape.expert_block());
        let (num_plain, num_sparse) = (holding.num_dense as f64, holding.num_sparse as f64);
        let shared = num_plain * plain.shared as f64 + num_sparse * sparse.shared as f64;
        let whole = num_plain * plain.whole as f64 + num_sparse * sparse.whole as f64;
        let mut dense = shared / tp + whole;
        if holding.has_embedding {
            dense += shape.embedding() as f64 / tp + shape.position_table() as f64;
        }
        if holding.has_head {
            dense += shape.norm() as f64;
            // A tied head lies with the embedding, unless the pipeline parts them.
            if !(shape.tie_word_embeddings && holding.has_embedding) {
                dense += shape.embedding() as f64 / tp;
            }
        }
        LocalParameters {
            dense,
            experts: num_sparse * sparse.experts as f64 / ep,
        }
    }
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
    /// Gathered for a moment, where parameters are sharded.
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
        let local = LocalParameters::of(shape, strategy, holding);
        let degrees = &strategy.degrees;
        let dense = states(strategy, local.dense, degrees.dp_shard * degrees.cp);
        let experts = states(strategy, local.experts, degrees.expert_shard());
        let mut sum = States {
            parameters: dense.parameters + experts.parameters,
            gradients: dense.gradients + experts.gradients,
            optimizer: dense.optimizer + experts.optimizer,
            gathered: 0.0,
            offloaded: 0.0,
        };
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

/// Of that many parameters, shared by that many ranks as far as the stage says.
fn states(strategy: &Strategy, parameters: f64, ranks: usize) -> States {
    let precision = &strategy.precision;
    let share = 1.0 / ranks.max(1) as f64;
    let from = |stage: usize| {
        if strategy.zero_stage >= stage {
            share
        } else {
            1.0
        }
    };
    States {
        parameters: parameters * precision.parameter as f64 * from(3),
        gradients: parameters * precision.gradient as f64 * from(2),
        optimizer: parameters * precision.optimizer as f64 * from(1),
        gathered: 0.0,
        offloaded: 0.0,
    }
}

/// One unit in use, one on its way and one's gradient: what PyTorch's planner of recomputation
/// budgets too.
fn gathered(shape: &Shape, strategy: &Strategy, holding: &Holding) -> f64 {
    let one = |num_dense, num_sparse, has_embedding| {
        let unit = Holding {
            num_dense,
            num_sparse,
            has_embedding,
            has_head: false,
            ..*holding
        };
        let local = LocalParameters::of(shape, strategy, &unit);
        local.dense + local.experts
    };
    let block = match holding.num_sparse {
        0 => one(1, 0, false),
        _ => one(0, 1, false),
    };
    let ends = holding.has_embedding || holding.has_head;
    let largest = if ends {
        block.max(one(0, 0, true))
    } else {
        block
    };
    3.0 * largest * strategy.precision.compute as f64
}

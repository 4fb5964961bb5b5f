//! Every optimizer under every way of sharding.

use trainyard_config::{Config, Dtype, MoeSection, OptimizerName};
use trainyard_conformance::{Outcome, Rank};

use super::equality::{SequenceParallel, equal_one_rank, job, tensor_parallel};
use super::pipeline::piped;

/// A job of an optimizer, with a learning rate at which rounding errors do not grow.
fn with(name: OptimizerName) -> Config {
    let mut config = job(Dtype::Float64);
    // Enough for a pipeline of four stages.
    config.model.num_hidden_layers = Some(4);
    config.optimizer.name = name.into();
    config.optimizer.lr = match name {
        OptimizerName::AdamW | OptimizerName::Lamb | OptimizerName::Muon => 1e-3,
        OptimizerName::Sgd => 0.05,
        OptimizerName::Lars => 1.0,
        OptimizerName::Lion => 1e-4,
    };
    if name == OptimizerName::Sgd {
        config.optimizer.nesterov = Some(true);
    }
    config
}

/// Replicated; ZeRO 1, 2 and 3; tensor parallel with and without sequence parallelism; a pipeline.
fn variants(rank: &Rank, config: &Config) -> Vec<Config> {
    let sharded = [1, 2, 3].map(|zero_stage| {
        let mut config = config.clone();
        config.parallelism.data_parallel_shard_degree = -1;
        config.parallelism.zero_stage = zero_stage;
        config
    });
    let tensor = [SequenceParallel::Disabled, SequenceParallel::SaveGathered]
        .map(|sequence| tensor_parallel(config, rank.size(), sequence));
    let others = [config.clone(), piped(config, rank.size(), "1f1b")];
    [&sharded[..], &tensor, &others].concat()
}

fn equal(rank: &Rank, name: OptimizerName) -> Outcome {
    let config = with(name);
    equal_one_rank(rank, &config, Dtype::Float64, &variants(rank, &config))
}

pub fn adamw(rank: &Rank) -> Outcome {
    equal(rank, OptimizerName::AdamW)
}

pub fn sgd(rank: &Rank) -> Outcome {
    equal(rank, OptimizerName::Sgd)
}

pub fn lamb(rank: &Rank) -> Outcome {
    equal(rank, OptimizerName::Lamb)
}

pub fn lars(rank: &Rank) -> Outcome {
    equal(rank, OptimizerName::Lars)
}

pub fn lion(rank: &Rank) -> Outcome {
    equal(rank, OptimizerName::Lion)
}

pub fn muon(rank: &Rank) -> Outcome {
    equal(rank, OptimizerName::Muon)
}

/// Experts on different ranks, with sharded states.
pub fn experts(rank: &Rank) -> Outcome {
    for name in [OptimizerName::Lamb, OptimizerName::Muon] {
        let mut config = with(name);
        config.model.moe = Some(MoeSection {
            num_experts: Some(4),
            moe_intermediate_size: Some(24),
            ..MoeSection::default()
        });
        let mut sharded = config.clone();
        sharded.parallelism.data_parallel_shard_degree = -1;
        sharded.parallelism.expert_parallel_degree = rank.size() as i64;
        equal_one_rank(rank, &config, Dtype::Float64, &[sharded])?;
    }
    Ok(())
}

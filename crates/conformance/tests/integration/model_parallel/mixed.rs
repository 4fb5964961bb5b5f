//! Several axes on eight ranks.

use trainyard_config::{Config, ContextMethod, Dtype};
use trainyard_conformance::{Outcome, Rank};

use super::bytes::check;
use super::equality::{
    METHODS, SEQUENCES, SequenceParallel, context_parallel, equal_one_rank, job, tensor_parallel,
};

fn data_parallel(config: &Config, replicate: i64, shard: i64, stage: usize) -> Config {
    let mut config = config.clone();
    config.parallelism.data_parallel_replicate_degree = replicate;
    config.parallelism.data_parallel_shard_degree = shard;
    config.parallelism.zero_stage = stage;
    config
}

/// tp 2 × dp 4, and tp 4 × dp 2.
pub fn replicated(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float64);
    let mut variants = SEQUENCES.map(|s| tensor_parallel(&config, 2, s)).to_vec();
    variants.push(tensor_parallel(&config, 4, SequenceParallel::SaveGathered));
    equal_one_rank(rank, &config, Dtype::Float64, &variants)
}

/// tp 2 × dp_shard 4, every stage.
pub fn sharded(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float64);
    let stages = [3, 3, 2, 1].into_iter().zip([
        SequenceParallel::SaveGathered,
        SequenceParallel::Disabled,
        SequenceParallel::SaveGathered,
        SequenceParallel::Regather,
    ]);
    let variants = stages.map(|(stage, sequence)| {
        let config = data_parallel(&config, 1, -1, stage);
        tensor_parallel(&config, 2, sequence)
    });
    equal_one_rank(rank, &config, Dtype::Float64, &variants.collect::<Vec<_>>())
}

/// tp 2 × dp_shard 2 × dp_replicate 2.
pub fn hybrid(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float64);
    let variants = [3, 3, 1].map(|stage| {
        let config = data_parallel(&config, 2, 2, stage);
        tensor_parallel(&config, 2, SequenceParallel::SaveGathered)
    });
    equal_one_rank(rank, &config, Dtype::Float64, &variants)
}

/// cp 2 × tp 2 × dp_shard 2.
pub fn context(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float64);
    let variants = METHODS.into_iter().flat_map(|method| {
        let config = data_parallel(&config, 1, 2, 3);
        let config = context_parallel(&config, 2, method);
        [SequenceParallel::SaveGathered, SequenceParallel::Disabled]
            .map(|sequence| tensor_parallel(&config, 2, sequence))
    });
    equal_one_rank(rank, &config, Dtype::Float64, &variants.collect::<Vec<_>>())
}

/// Bytes of all axes together.
pub fn bytes(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float32);
    let tensor = tensor_parallel(&config, 2, SequenceParallel::SaveGathered);
    check(rank, &tensor)?;
    check(rank, &data_parallel(&tensor, 1, -1, 3))?;
    check(rank, &data_parallel(&tensor, 2, 2, 3))?;
    let context = context_parallel(&tensor, 2, ContextMethod::Ring);
    check(rank, &data_parallel(&context, 1, 2, 3))
}

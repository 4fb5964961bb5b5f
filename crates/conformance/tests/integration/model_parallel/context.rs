//! Context parallelism over all ranks, by both methods. On four ranks there are fewer KV heads than ranks.

use trainyard_config::{Config, Dtype};
use trainyard_conformance::{Outcome, Rank};

use super::equality::{
    METHODS, context_parallel, equal_one_rank, job, recomputation_changes_no_bit,
};

fn variants(rank: &Rank, config: &Config) -> Vec<Config> {
    // Accumulation alternates, so each method runs with and without it.
    METHODS
        .into_iter()
        .flat_map(|method| vec![context_parallel(config, rank.size(), method); 2])
        .collect()
}

pub fn fp64(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float64);
    equal_one_rank(rank, &config, Dtype::Float64, &variants(rank, &config))
}

pub fn fp32(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float32);
    equal_one_rank(rank, &config, Dtype::Float32, &variants(rank, &config))
}

/// Compared with one rank in bfloat16; a ring rounds the gradients of keys once per rank.
pub fn bf16(rank: &Rank) -> Outcome {
    let mut config = job(Dtype::Float32);
    config.training.mixed_precision_param = Some(Dtype::Bfloat16);
    equal_one_rank(rank, &config, Dtype::Bfloat16, &variants(rank, &config))
}

pub fn recomputation(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float32);
    METHODS.into_iter().try_for_each(|method| {
        recomputation_changes_no_bit(rank, &context_parallel(&config, rank.size(), method))
    })
}

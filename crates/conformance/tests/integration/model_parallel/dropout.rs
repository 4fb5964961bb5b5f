//! Dropout drops the same elements as one rank, however the work is divided.

use trainyard_config::{Config, Dtype};
use trainyard_conformance::{Outcome, Rank};

use super::equality::{
    METHODS, SEQUENCES, context_parallel, equal_one_rank, job, recomputation_changes_no_bit,
    tensor_parallel,
};

fn with_dropout(dtype: Dtype) -> Config {
    let mut config = job(dtype);
    config.model.resid_pdrop = Some(0.2);
    config
}

/// Every strategy, on all ranks.
fn variants(rank: &Rank, config: &Config) -> Vec<Config> {
    let mut sharded = config.clone();
    sharded.parallelism.data_parallel_shard_degree = -1;
    let mut all = vec![config.clone(), sharded];
    all.extend(SEQUENCES.map(|sequence| tensor_parallel(config, rank.size(), sequence)));
    all.extend(METHODS.map(|method| context_parallel(config, rank.size(), method)));
    all
}

pub fn equal(rank: &Rank) -> Outcome {
    let config = with_dropout(Dtype::Float64);
    equal_one_rank(rank, &config, Dtype::Float64, &variants(rank, &config))
}

/// Recomputation drops the same elements again.
pub fn recomputation(rank: &Rank) -> Outcome {
    let config = with_dropout(Dtype::Float32);
    let mut shared = variants(rank, &config).into_iter().skip(2);
    shared.try_for_each(|config| recomputation_changes_no_bit(rank, &config))
}

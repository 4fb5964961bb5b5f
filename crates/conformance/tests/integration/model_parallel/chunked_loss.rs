//! The loss in chunks on every kind of mesh, compared with one rank that has all logits at once.

use trainyard_config::{Config, ContextMethod, Dtype};
use trainyard_conformance::training::{
    Tolerance, agreed_fingerprint, divided, on_rank_0, reference, train_on,
};
use trainyard_conformance::{Outcome, Rank};

use super::bytes;
use super::equality::{
    SEQUENCES, context_parallel, job, num_data_ranks, recomputation_changes_no_bit, tensor_parallel,
};
use super::pipeline::piped;

/// Does not divide the tokens of any rank.
const NUM_CHUNKS: usize = 5;

fn chunked(mut config: Config) -> Config {
    config.training.num_loss_chunks = NUM_CHUNKS;
    config
}

fn variants(rank: &Rank, config: &Config) -> Vec<Config> {
    let size = rank.size();
    let mut variants = vec![config.clone()];
    let mut sharded = config.clone();
    sharded.parallelism.data_parallel_shard_degree = size as i64;
    variants.push(sharded);
    variants.extend(SEQUENCES.map(|sequence| tensor_parallel(config, size, sequence)));
    variants.push(context_parallel(config, size, ContextMethod::Ring));
    variants.extend(["1f1b", "zb-h1"].map(|schedule| piped(config, size, schedule)));
    variants.into_iter().map(chunked).collect()
}

fn equal(rank: &Rank, config: &Config, dtype: Dtype) -> Outcome {
    let expected = on_rank_0(rank, || reference(&config.on_one_rank()))?;
    for variant in variants(rank, config) {
        let num_data_ranks = num_data_ranks(rank, &variant)?;
        let run = train_on(rank, &divided(&variant, num_data_ranks, 2))?;
        agreed_fingerprint(rank, &run)?;
        if let Some(expected) = &expected {
            run.assert_agrees(expected, Tolerance::of(dtype));
        }
    }
    Ok(())
}

pub fn fp64(rank: &Rank) -> Outcome {
    let mut config = job(Dtype::Float64);
    equal(rank, &config, Dtype::Float64)?;
    config.model.tie_word_embeddings = Some(true);
    equal(rank, &config, Dtype::Float64)
}

pub fn bf16(rank: &Rank) -> Outcome {
    let mut config = job(Dtype::Float32);
    config.training.mixed_precision_param = Some(Dtype::Bfloat16);
    equal(rank, &config, Dtype::Bfloat16)
}

pub fn recomputation(rank: &Rank) -> Outcome {
    let config = chunked(job(Dtype::Float32));
    SEQUENCES.into_iter().try_for_each(|sequence| {
        recomputation_changes_no_bit(rank, &tensor_parallel(&config, rank.size(), sequence))
    })
}

pub fn sent_bytes(rank: &Rank) -> Outcome {
    let mut variants = variants(rank, &job(Dtype::Float32)).into_iter();
    variants.try_for_each(|config| bytes::check(rank, &config))
}

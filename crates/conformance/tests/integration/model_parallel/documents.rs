//! Document masks with tensor, context and pipeline parallelism.

use trainyard_config::{AttentionMask, Config, ContextMethod, Dtype};
use trainyard_conformance::training::{on_rank_0, reference};
use trainyard_conformance::{Outcome, Rank};

use super::equality::{
    SEQUENCES, context_parallel, equal_one_rank, job, recomputation_changes_no_bit, tensor_parallel,
};
use super::pipeline::piped;

/// A token that occurs in synthetic data.
const END: i64 = 5;

fn packed(dtype: Dtype) -> Config {
    let mut config = job(dtype);
    config.model.attn_mask_type = AttentionMask::BlockCausal;
    config.training.eos_token_id = Some(END);
    config
}

pub fn equal(rank: &Rank) -> Outcome {
    let config = packed(Dtype::Float64);
    let mut all = SEQUENCES
        .map(|sequence| tensor_parallel(&config, rank.size(), sequence))
        .to_vec();
    let ulysses = context_parallel(&config, rank.size(), ContextMethod::Ulysses);
    // Accumulation alternates, so each method runs with and without it.
    all.extend([config.clone(), ulysses.clone(), ulysses]);
    all.push(piped(&config, rank.size(), "1f1b"));
    equal_one_rank(rank, &config, Dtype::Float64, &all)
}

/// Without a difference the other tests would show nothing.
pub fn make_a_difference(rank: &Rank) -> Outcome {
    let apart = on_rank_0(rank, || reference(&packed(Dtype::Float64)))?;
    let together = on_rank_0(rank, || reference(&job(Dtype::Float64)))?;
    if let (Some(apart), Some(together)) = (apart, together) {
        assert_ne!(apart.losses, together.losses);
    }
    Ok(())
}

pub fn recomputation(rank: &Rank) -> Outcome {
    let config = context_parallel(&packed(Dtype::Float32), rank.size(), ContextMethod::Ulysses);
    recomputation_changes_no_bit(rank, &config)
}

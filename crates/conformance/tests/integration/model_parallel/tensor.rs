//! Tensor parallelism over all ranks. On four ranks there are fewer KV heads than ranks.

use trainyard_config::{Config, Dtype};
use trainyard_conformance::training::{Session, assert_close, divided};
use trainyard_conformance::{Outcome, Rank};
use trainyard_nn::{Device, weights};
use trainyard_torch::World;
use trainyard_trace::Ledger;
use trainyard_train::build;

use super::equality::{
    SEQUENCES, SequenceParallel, equal_one_rank, job, recomputation_changes_no_bit, tensor_parallel,
};

fn variants(rank: &Rank, config: &Config) -> Vec<Config> {
    SEQUENCES
        .map(|sequence| tensor_parallel(config, rank.size(), sequence))
        .to_vec()
}

pub fn fp64(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float64);
    let mut all = variants(rank, &config);
    for mut config in variants(rank, &config) {
        config.parallelism.enable_async_tensor_parallel = false;
        all.push(config);
    }
    equal_one_rank(rank, &config, Dtype::Float64, &all)
}

pub fn fp32(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float32);
    equal_one_rank(rank, &config, Dtype::Float32, &variants(rank, &config))
}

/// Compared with one rank in bfloat16, whose sums over features are rounded once and not once per rank.
pub fn bf16(rank: &Rank) -> Outcome {
    let mut config = job(Dtype::Float32);
    config.training.mixed_precision_param = Some(Dtype::Bfloat16);
    equal_one_rank(rank, &config, Dtype::Bfloat16, &variants(rank, &config))
}

/// The shared weight is split in the same way for the embedding and the head.
pub fn tied(rank: &Rank) -> Outcome {
    let mut config = job(Dtype::Float64);
    config.model.tie_word_embeddings = Some(true);
    equal_one_rank(rank, &config, Dtype::Float64, &variants(rank, &config))
}

pub fn recomputation(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float32);
    let mut variants = variants(rank, &config).into_iter();
    variants.try_for_each(|config| recomputation_changes_no_bit(rank, &config))
}

/// Each rank reads its shard from a file of full weights.
pub fn from_file(rank: &Rank) -> Outcome {
    let mut config = job(Dtype::Float64);
    let mut other = config.clone();
    other.debug.seed = 77;
    let alone = World::single_rank(Ledger::new(0))?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("weights.safetensors");
    weights::save(&path, &build::model(&(&other).into(), &alone, Device::Cpu)?)?;
    config.model.initial_weights = Some(path);
    equal_one_rank(rank, &config, Dtype::Float64, &variants(rank, &config))
}

/// Forward passes without backward.
pub fn evaluation(rank: &Rank) -> Outcome {
    let loss = |config: &Config, world: &World| -> Result<f64, Box<dyn std::error::Error>> {
        let session = Session::new(config, world)?;
        Ok(session.trainer.evaluate(&session.batches()?)?)
    };
    let config = divided(&job(Dtype::Float64), 1, 1);
    let expected = loss(&config, &World::single_rank(Ledger::new(0))?)?;
    for sequence in [SequenceParallel::Disabled, SequenceParallel::SaveGathered] {
        let config = tensor_parallel(&config, rank.size(), sequence);
        let found = loss(&config, &*rank.join_config(&config)?)?;
        assert_close("loss", &[found], &[expected], 1e-9);
    }
    Ok(())
}

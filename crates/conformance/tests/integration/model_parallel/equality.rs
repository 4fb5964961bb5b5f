//! A job with tensor or context parallelism, compared with one rank.

use trainyard_config::{ActivationCheckpointMode, Config, ContextMethod, Dtype};
use trainyard_conformance::training::{
    Tolerance, agreed_fingerprint, debug_llama, divided, on_rank_0, reference, train_on,
};
use trainyard_conformance::{Outcome, Rank};
use trainyard_train::data_axes;

/// The form of sequence parallelism.
#[derive(Debug, Clone, Copy)]
pub enum SequenceParallel {
    Disabled,
    SaveGathered,
    Regather,
}

pub const SEQUENCES: [SequenceParallel; 3] = [
    SequenceParallel::Disabled,
    SequenceParallel::SaveGathered,
    SequenceParallel::Regather,
];
pub const METHODS: [ContextMethod; 2] = [ContextMethod::Ring, ContextMethod::Ulysses];

/// The config with tensor parallelism over `degree` ranks.
pub fn tensor_parallel(config: &Config, degree: usize, sequence: SequenceParallel) -> Config {
    let mut config = config.clone();
    let section = &mut config.parallelism;
    section.tensor_parallel_degree = degree as i64;
    section.enable_sequence_parallel = !matches!(sequence, SequenceParallel::Disabled);
    section.sequence_parallel_regather = matches!(sequence, SequenceParallel::Regather);
    config
}

/// The config with context parallelism over `degree` ranks.
pub fn context_parallel(config: &Config, degree: usize, method: ContextMethod) -> Config {
    let mut config = config.clone();
    config.parallelism.context_parallel_degree = degree as i64;
    config.parallelism.context_parallel_method = method;
    config
}

/// The job of these tests. It has few steps, because a step of eight ranks on two cores takes long.
pub fn job(dtype: Dtype) -> Config {
    let mut config = debug_llama(dtype);
    config.training.steps = 8;
    config
}

/// Trains every variant on all ranks, with one and with two micro-batches. All ranks agree to the bit, and with one rank
/// within the tolerance of the type.
pub fn equal_one_rank(rank: &Rank, config: &Config, dtype: Dtype, variants: &[Config]) -> Outcome {
    equal_within(rank, config, Tolerance::of(dtype), variants)
}

/// The same with a given tolerance.
pub fn equal_within(
    rank: &Rank,
    config: &Config,
    tolerance: Tolerance,
    variants: &[Config],
) -> Outcome {
    let expected = on_rank_0(rank, || reference(&config.on_one_rank()))?;
    for (number, variant) in variants.iter().enumerate() {
        let num_data_ranks = num_data_ranks(rank, variant)?;
        // Every second variant accumulates gradients.
        let variant = divided(variant, num_data_ranks, 1 + number % 2);
        let run = train_on(rank, &variant)?;
        agreed_fingerprint(rank, &run)?;
        if let Some(expected) = &expected {
            run.assert_agrees(expected, tolerance);
        }
    }
    Ok(())
}

/// Recomputed layers communicate again in backward, in the same order on every rank.
pub fn recomputation_changes_no_bit(rank: &Rank, config: &Config) -> Outcome {
    let mut prints = Vec::new();
    for mode in [
        ActivationCheckpointMode::None,
        ActivationCheckpointMode::Selective,
        ActivationCheckpointMode::Full,
    ] {
        let mut config = divided(config, 1, 1);
        config.training.steps = 4;
        config.activation_checkpoint.mode = mode;
        prints.push(agreed_fingerprint(rank, &train_on(rank, &config)?)?);
    }
    assert!(
        prints.iter().all(|print| *print == prints[0]),
        "recomputation changes the result: {:?}",
        config.parallelism
    );
    Ok(())
}

/// The number of ranks over which a config divides the batch.
pub fn num_data_ranks(rank: &Rank, config: &Config) -> Result<usize, Box<dyn std::error::Error>> {
    Ok(config.mesh(rank.size())?.size_of(data_axes()))
}

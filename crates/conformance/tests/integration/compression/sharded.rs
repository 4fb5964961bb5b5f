//! Compression of sharded states: ZeRO++.

use std::error::Error;

use trainyard_config::{Config, Dtype, GradientCompression, ParameterCompression};
use trainyard_conformance::training::{
    Tolerance, Trained, debug_llama, divided, on_rank_0, reference, train_on,
};
use trainyard_conformance::{Outcome, Rank};
use trainyard_trace::Purpose;

/// AdamW's first updates have the size of the learning rate whatever the size of a gradient, so that parameters with small
/// gradients differ more than losses.
const CLOSE: Tolerance = Tolerance {
    losses: 1e-2,
    grad_norms: 1e-1,
    parameters: 3e-1,
};

/// Trains with the given number of replicas, and checks the bytes.
fn trained(
    rank: &Rank,
    config: &Config,
    num_replicas: usize,
    what: &str,
) -> Result<Trained, Box<dyn Error>> {
    let mut config = config.clone();
    config.parallelism.data_parallel_replicate_degree = num_replicas as i64;
    config.parallelism.data_parallel_shard_degree = -1;
    let run = train_on(rank, &config)?;
    run.assert_bytes(rank, 0, what)?;
    Ok(run)
}

/// Gradients of 8 bits: between the ranks that shard a replica, and between replicas.
pub fn gradients(rank: &Rank) -> Outcome {
    let config = debug_llama(Dtype::Float32);
    let expected = on_rank_0(rank, || reference(&config))?;
    let sent = |run: &Trained| run.totals.of_purpose(Purpose::Gradient).sent_bytes as f64;
    for (stage, num_replicas, num_microbatches) in [(1, 1, 1), (2, 1, 2), (3, 1, 1), (3, 2, 2)] {
        let mut config = divided(&config, rank.size(), num_microbatches);
        config.parallelism.zero_stage = stage;
        let what = format!("stage {stage}, {num_replicas} replicas");
        let plain = sent(&trained(rank, &config, num_replicas, &what)?);
        for compression in [GradientCompression::Int8, GradientCompression::Fp8] {
            config.parallelism.gradient_compression = compression;
            let run = trained(rank, &config, num_replicas, &what)?;
            if let Some(expected) = &expected {
                run.assert_agrees(expected, CLOSE);
            }
            let ratio = plain / sent(&run);
            assert!(ratio > 3.8, "{what}: only {ratio} times fewer bytes");
        }
    }
    Ok(())
}

/// Parameters of 8 bits are not those that the optimizer updates, so losses are close, but not equal.
pub fn parameters(rank: &Rank) -> Outcome {
    let config = debug_llama(Dtype::Float32);
    let expected = on_rank_0(rank, || reference(&config))?;
    let mut config = divided(&config, rank.size(), 2);
    let sent = |run: &Trained| run.totals.of_purpose(Purpose::Parameter).sent_bytes as f64;
    let plain = sent(&trained(rank, &config, 1, "plain")?);
    config.parallelism.parameter_compression = ParameterCompression::Int8;
    let run = trained(rank, &config, 1, "int8 parameters")?;
    if let Some(expected) = &expected {
        run.assert_agrees(expected, CLOSE);
    }
    let ratio = plain / sent(&run);
    assert!(ratio > 3.8, "only {ratio} times fewer bytes");
    Ok(())
}

/// A second copy of the parameters changes who sends them, not their values.
pub fn secondary(rank: &Rank) -> Outcome {
    for dtype in [Dtype::Float64, Dtype::Float32] {
        let config = debug_llama(dtype);
        let expected = on_rank_0(rank, || reference(&config))?;
        for num_microbatches in [1, 2] {
            let mut config = divided(&config, rank.size(), num_microbatches);
            config.parallelism.fsdp_secondary_shards = true;
            let run = trained(rank, &config, 2, "secondary shards")?;
            if let Some(expected) = &expected {
                run.assert_agrees(expected, Tolerance::of(dtype));
            }
        }
    }
    // With all three: parameters and gradients of 8 bits, and secondary shards.
    let config = debug_llama(Dtype::Float32);
    let expected = on_rank_0(rank, || reference(&config))?;
    let mut config = divided(&config, rank.size(), 2);
    config.parallelism.fsdp_secondary_shards = true;
    config.parallelism.parameter_compression = ParameterCompression::Int8;
    config.parallelism.gradient_compression = GradientCompression::Int8;
    let run = trained(rank, &config, 2, "ZeRO++")?;
    if let Some(expected) = &expected {
        run.assert_agrees(expected, CLOSE);
    }
    Ok(())
}

//! Bytes sent, counted by the ledger and by the kernel.

use std::error::Error;

use trainyard_config::{Config, Dtype, ReshardAfterForward};
use trainyard_conformance::training::{Trained, debug_llama, divided, train_on};
use trainyard_conformance::{Outcome, Rank};

/// Trains with sharded states and `num_replicas` replicas.
pub fn sharded(
    rank: &Rank,
    config: &mut Config,
    num_replicas: usize,
) -> Result<Trained, Box<dyn Error>> {
    config.parallelism.data_parallel_replicate_degree = num_replicas as i64;
    config.parallelism.data_parallel_shard_degree = -1;
    train_on(rank, config)
}

/// Stages 1 and 2 send twice the model, stage 3 three times, each times (n - 1)/n; the closed form covers accumulation
/// and types.
pub fn closed_form(rank: &Rank) -> Outcome {
    for stage in [1, 2, 3] {
        for num_microbatches in [1, 2] {
            for mixed in [None, Some(Dtype::Bfloat16)] {
                let mut config = debug_llama(Dtype::Float32);
                config.training.mixed_precision_param = mixed;
                check(rank, config, stage, num_microbatches, 1)?;
            }
        }
    }
    for stage in [1, 2, 3] {
        let mut config = debug_llama(Dtype::Float32);
        config.parallelism.reduce_bucket_size = Some(500_000);
        check(rank, config, stage, 2, 1)?;
    }
    // One case in plain numbers, in addition to the formula.
    let mut config = divided(&debug_llama(Dtype::Float32), rank.size(), 1);
    config.training.steps = 2;
    config.parallelism.fsdp_reshard_after_forward = ReshardAfterForward::Always;
    let num_parameters = config.model.resolve()?.num_parameters().unwrap_or_default();
    let run = sharded(rank, &mut config, 1)?;
    let sent = run.volume.gradients + run.volume.parameters;
    let expected = 3 * (rank.size() as u64 - 1) * num_parameters * 4;
    assert!(
        sent >= expected && sent < expected + 100 * 1024,
        "{sent}, not {expected}"
    );
    Ok(())
}

pub fn hybrid(rank: &Rank) -> Outcome {
    for stage in [1, 2, 3] {
        for num_microbatches in [1, 2] {
            let config = debug_llama(Dtype::Float32);
            check(rank, config, stage, num_microbatches, 2)?;
        }
    }
    Ok(())
}

fn check(
    rank: &Rank,
    config: Config,
    stage: usize,
    num_microbatches: usize,
    num_replicas: usize,
) -> Outcome {
    let mut config = divided(&config, rank.size(), num_microbatches);
    config.training.steps = 3;
    config.parallelism.zero_stage = stage;
    let run = sharded(rank, &mut config, num_replicas)?;
    let what = format!("stage {stage}, {num_microbatches} micro-batches");
    run.assert_bytes(rank, 0, &what)
}

//! Checks by a dry run whether a job fits into its memory limit, and suggests settings that fit.
//!
//! The check runs before training starts, so that no time is spent on a job that would run out of memory.

use trainyard_config::{ActivationCheckpointMode, Config};
use trainyard_torch::World;

use crate::dry_run::{dry_run_in, fake_world};
use crate::error::{Result, TrainError};
use crate::train_spec::TrainSpec;
use crate::trainer::data_axes;

/// Returns an error if the peak memory of a rank would exceed `training.memory_limit_bytes`.
pub fn check(spec: &TrainSpec, world: &World) -> Result<()> {
    let limit = spec.training.memory_limit_bytes;
    if limit == 0 {
        return Ok(());
    }
    let peak = peak(spec, world.size(), world)?;
    if peak <= limit {
        return Ok(());
    }
    Err(TrainError::OverLimit {
        limit,
        peak,
        advice: advice(spec, world, limit),
    })
}

/// The peak memory of rank 0 of `num_ranks` ranks on the device of `world`.
fn peak(spec: &TrainSpec, num_ranks: usize, world: &World) -> Result<u64> {
    let fake = fake_world(spec, num_ranks, 0)?.simulating_gpu(world.is_on_gpu());
    Ok(dry_run_in(&fake, spec)?.peak_bytes)
}

/// Settings that fit, the smallest change first.
fn advice(spec: &TrainSpec, world: &World, limit: u64) -> String {
    let world_size = world.size();
    let mut tried = Vec::new();
    for (setting, change) in changes() {
        let mut other = Config::clone(spec);
        change(&mut other);
        let other = spec.with_config(other);
        // A larger world may be necessary.
        for num_ranks in [world_size, 2 * world_size, 4 * world_size, 8 * world_size] {
            let batching = other
                .mesh(num_ranks)
                .and_then(|mesh| other.batching(mesh.size_of(data_axes())));
            if batching.is_err() || other.check().is_err() {
                continue;
            }
            let Ok(peak) = peak(&other, num_ranks, world) else {
                continue;
            };
            if peak <= limit {
                tried.push(format!("{setting} on {num_ranks} ranks ({peak} bytes)"));
                break;
            }
        }
    }
    if tried.is_empty() {
        "no sharding or recomputation setting fits: lower training.local_batch_size or seq_len, or \
                 offload states to files with parallelism.offload = \"nvme\""
            .to_owned()
    } else {
        format!("settings that fit: {}", tried.join("; "))
    }
}

type Change = fn(&mut Config);

fn changes() -> [(&'static str, Change); 5] {
    fn shard(config: &mut Config, stage: usize) {
        config.parallelism.data_parallel_replicate_degree = 1;
        config.parallelism.data_parallel_shard_degree = -1;
        config.parallelism.zero_stage = stage;
    }
    [
        ("activation_checkpoint.mode = \"full\"", |c| {
            c.activation_checkpoint.mode = ActivationCheckpointMode::Full;
            c.activation_checkpoint.memory_budget_bytes = 0;
        }),
        (
            "parallelism.zero_stage = 1 over data_parallel_shard_degree = -1",
            |c| {
                shard(c, 1);
            },
        ),
        (
            "parallelism.zero_stage = 2 over data_parallel_shard_degree = -1",
            |c| {
                shard(c, 2);
            },
        ),
        (
            "parallelism.zero_stage = 3 over data_parallel_shard_degree = -1",
            |c| {
                shard(c, 3);
            },
        ),
        (
            "zero_stage = 3 with activation_checkpoint.mode = \"full\"",
            |c| {
                shard(c, 3);
                c.activation_checkpoint.mode = ActivationCheckpointMode::Full;
                c.activation_checkpoint.memory_budget_bytes = 0;
            },
        ),
    ]
}

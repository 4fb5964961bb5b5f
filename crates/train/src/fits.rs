//! Whether a job stays within its memory limit, and if not, what would.
//!
//! Everything is asked of dry runs, before any rank has spent a minute on a job that cannot fit.

use trainyard_config::{ActivationCheckpointMode, Config, Offload};
use trainyard_torch::World;

use crate::dry_run::dry_run;
use crate::error::{Result, TrainError};
use crate::trainer::data_axes;

/// Refuses a job whose ranks would hold more than `training.memory_limit_bytes`.
pub fn check(config: &Config, world: &World) -> Result<()> {
    let limit = config.training.memory_limit_bytes;
    // What goes to files is not followed by dry runs.
    if limit == 0 || config.parallelism.offload != Offload::None {
        return Ok(());
    }
    let peak = dry_run(config, world.size(), 0)?.peak_bytes;
    if peak <= limit {
        return Ok(());
    }
    Err(TrainError::OverLimit {
        limit,
        peak,
        advice: advice(config, world.size(), limit),
    })
}

/// What fits, nearest to what was asked for first.
fn advice(config: &Config, world_size: usize, limit: u64) -> String {
    let mut tried = Vec::new();
    for (words, change) in changes() {
        let mut other = config.clone();
        change(&mut other);
        // More ranks than there are may be what it takes.
        for num_ranks in [world_size, 2 * world_size, 4 * world_size, 8 * world_size] {
            let batching = other
                .mesh(num_ranks)
                .and_then(|mesh| other.batching(mesh.size_of(data_axes())));
            if batching.is_err() || other.check().is_err() {
                continue;
            }
            let Ok(run) = dry_run(&other, num_ranks, 0) else {
                continue;
            };
            if run.peak_bytes <= limit {
                tried.push(format!(
                    "{words} on {num_ranks} ranks ({} bytes)",
                    run.peak_bytes
                ));
                break;
            }
        }
    }
    match tried.is_empty() {
        true => {
            "nothing tried fits: lower training.local_batch_size or seq_len, or keep states in \
                 files with parallelism.offload = \"nvme\""
                .to_owned()
        }
        false => format!("what fits: {}", tried.join("; ")),
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

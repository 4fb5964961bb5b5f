//! Layers spread over ranks, by every schedule.

use trainyard_config::{Config, Dtype};
use trainyard_conformance::training::{
    Tolerance, agreed_fingerprint, divided, on_first, reference, train_on,
};
use trainyard_conformance::{Outcome, Rank};

use crate::bytes::check;
use crate::equality::{Sequence, job, num_data_ranks, tensor_parallel};

const SCHEDULES: [&str; 7] = [
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-v",
    "dualpipe-v",
];

/// Deep enough for two stages on each of four ranks, and not evenly so.
fn deep(dtype: Dtype) -> Config {
    let mut config = job(dtype);
    config.training.steps = 5;
    config.model.num_hidden_layers = Some(7);
    config
}

fn piped(config: &Config, degree: usize, schedule: &str) -> Config {
    let mut config = config.clone();
    config.parallelism.pipeline_parallel_degree = degree as i64;
    config.parallelism.pipeline_parallel_schedule = schedule.to_owned();
    config
}

fn equal(rank: &Rank, config: &Config, dtype: Dtype, variants: &[(Config, usize)]) -> Outcome {
    let expected = on_first(rank, || reference(&config.on_one_rank()))?;
    for (variant, num_microbatches) in variants {
        let num_data_ranks = num_data_ranks(rank, variant)?;
        let variant = divided(variant, num_data_ranks, *num_microbatches);
        let run = train_on(rank, &variant)?;
        agreed_fingerprint(rank, &run)?;
        if let Some(expected) = &expected {
            run.assert_agrees(expected, Tolerance::of(dtype));
        }
    }
    Ok(())
}

/// Every schedule, with more and with fewer micro-batches than it takes to fill the pipeline.
pub fn fp64(rank: &Rank) -> Outcome {
    let config = deep(Dtype::Float64);
    let variants = SCHEDULES.map(|schedule| {
        let num = if schedule == "interleaved" { 2 } else { 8 };
        (piped(&config, rank.size(), schedule), num)
    });
    equal(rank, &config, Dtype::Float64, &variants)
}

pub fn fp32(rank: &Rank) -> Outcome {
    let config = deep(Dtype::Float32);
    let variants = ["1f1b", "interleaved"].map(|schedule| {
        let config = piped(&config, rank.size(), schedule);
        (config, 8)
    });
    equal(rank, &config, Dtype::Float32, &variants)
}

/// The first stage's table is the last's too: on two ranks, or on one.
pub fn tied(rank: &Rank) -> Outcome {
    let mut config = deep(Dtype::Float64);
    config.model.tie_word_embeddings = Some(true);
    let variants =
        ["1f1b", "interleaved", "zb-v"].map(|schedule| (piped(&config, rank.size(), schedule), 4));
    equal(rank, &config, Dtype::Float64, &variants)?;
    config.training.dtype = Dtype::Float32;
    check(rank, &piped(&config, rank.size(), "1f1b"))
}

/// pp 2 with two other ranks along another axis.
pub fn with_one_axis(rank: &Rank) -> Outcome {
    let config = deep(Dtype::Float64);
    let mut variants = Vec::new();
    for schedule in ["1f1b", "zb-v"] {
        let config = piped(&config, 2, schedule);
        let mut sharded = config.clone();
        sharded.parallelism.data_parallel_shard_degree = -1;
        variants.push((tensor_parallel(&config, 2, Sequence::Kept), 4));
        variants.push((config, 4));
        variants.push((sharded, 4));
    }
    equal(rank, &config, Dtype::Float64, &variants)
}

/// 2 × 2 × 2.
pub fn with_two_axes(rank: &Rank) -> Outcome {
    let config = deep(Dtype::Float64);
    let mut variants = Vec::new();
    for schedule in ["1f1b", "interleaved"] {
        let config = tensor_parallel(&piped(&config, 2, schedule), 2, Sequence::Kept);
        let mut sharded = config.clone();
        sharded.parallelism.data_parallel_shard_degree = -1;
        variants.push((config, 4));
        variants.push((sharded, 4));
    }
    equal(rank, &config, Dtype::Float64, &variants)
}

/// Activations forward and their gradients back, beside what stages send among themselves.
pub fn bytes(rank: &Rank) -> Outcome {
    let config = deep(Dtype::Float32);
    for schedule in ["1f1b", "zb-v"] {
        check(rank, &piped(&config, rank.size(), schedule))?;
    }
    Ok(())
}

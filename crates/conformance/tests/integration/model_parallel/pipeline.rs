//! Pipeline parallelism with every schedule.

use trainyard_config::{Config, Dtype, PipelineReduce, ReshardAfterForward};
use trainyard_conformance::training::{
    Tolerance, agreed_fingerprint, divided, on_rank_0, reference, train_on,
};
use trainyard_conformance::{Outcome, Rank};
use trainyard_schedule::ScheduleKind;

use super::bytes::check;
use super::equality::{SequenceParallel, job, num_data_ranks, tensor_parallel};

/// A model deep enough for two stages on each of four ranks, whose layers do not divide evenly.
pub fn deep(dtype: Dtype) -> Config {
    let mut config = job(dtype);
    config.training.steps = 5;
    config.model.num_hidden_layers = Some(7);
    config
}

/// A model with equally many units for every stage of two, four or eight.
pub fn even(dtype: Dtype) -> Config {
    let mut config = deep(dtype);
    config.model.num_hidden_layers = Some(6);
    config
}

/// The same with states sharded over the other ranks.
fn sharded(config: &Config, zero_stage: usize) -> Config {
    let mut config = config.clone();
    config.parallelism.data_parallel_shard_degree = -1;
    config.parallelism.zero_stage = zero_stage;
    config
}

pub fn piped(config: &Config, degree: usize, schedule: &str) -> Config {
    let mut config = config.clone();
    config.parallelism.pipeline_parallel_degree = degree as i64;
    config.parallelism.pipeline_parallel_schedule = schedule.to_owned();
    config
}

fn equal(rank: &Rank, config: &Config, dtype: Dtype, variants: &[(Config, usize)]) -> Outcome {
    let expected = on_rank_0(rank, || reference(&config.on_one_rank()))?;
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

/// Every schedule, with more and with fewer micro-batches than fill the pipeline.
pub fn fp64(rank: &Rank) -> Outcome {
    let config = deep(Dtype::Float64);
    let variants = ScheduleKind::ALL.map(|kind| {
        let schedule = kind.name();
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

/// The first and the last stage share the embedding: on two ranks, or on one.
pub fn tied(rank: &Rank) -> Outcome {
    let mut config = even(Dtype::Float64);
    config.model.tie_word_embeddings = Some(true);
    let variants = ScheduleKind::ALL.map(|kind| (piped(&config, rank.size(), kind.name()), 4));
    equal(rank, &config, Dtype::Float64, &variants)?;
    config.training.dtype = Dtype::Float32;
    check(rank, &piped(&config, rank.size(), "1f1b"))
}

/// pp 2 combined with two ranks along another axis.
pub fn with_one_axis(rank: &Rank) -> Outcome {
    let config = deep(Dtype::Float64);
    let mut variants = Vec::new();
    for schedule in ["1f1b", "zb-v", "dualpipe-v"] {
        let config = piped(&config, 2, schedule);
        variants.push((
            tensor_parallel(&config, 2, SequenceParallel::SaveGathered),
            4,
        ));
        variants.push((config, 4));
    }
    equal(rank, &config, Dtype::Float64, &variants)
}

/// Every ZeRO stage with one and with two pipeline stages per rank, with full and with split backward; reduced once per
/// step, and with each backward.
pub fn with_sharding(rank: &Rank) -> Outcome {
    let config = deep(Dtype::Float64);
    let mut variants = Vec::new();
    for zero_stage in 1..=3 {
        for schedule in ["1f1b", "interleaved", "zb-h1", "zb-v"] {
            let config = sharded(&piped(&config, 2, schedule), zero_stage);
            variants.push((config, 4));
        }
        let mut each = sharded(&piped(&config, 2, "zb-h1"), zero_stage);
        each.parallelism.pipeline_parallel_reduce = PipelineReduce::Each;
        variants.push((each, 4));
    }
    let mut lean = sharded(&piped(&config, 2, "interleaved"), 3);
    lean.parallelism.fsdp_reshard_after_forward = ReshardAfterForward::Always;
    variants.push((lean, 4));
    equal(rank, &config, Dtype::Float64, &variants)
}

/// 2 × 2 × 2.
pub fn with_two_axes(rank: &Rank) -> Outcome {
    let config = deep(Dtype::Float64);
    let mut variants = Vec::new();
    for schedule in ["1f1b", "interleaved"] {
        let config = tensor_parallel(
            &piped(&config, 2, schedule),
            2,
            SequenceParallel::SaveGathered,
        );
        variants.push((sharded(&config, 3), 4));
        variants.push((config, 4));
    }
    equal(rank, &config, Dtype::Float64, &variants)
}

/// Activations and their gradients between stages, and what the ranks of a stage send each other.
pub fn bytes(rank: &Rank) -> Outcome {
    let config = deep(Dtype::Float32);
    for schedule in ["1f1b", "zb-v"] {
        check(rank, &piped(&config, rank.size(), schedule))?;
    }
    Ok(())
}

/// A stage that stays unsharded is gathered once per step, and one that holds full gradients reduces them once;
/// otherwise both happen for every micro-batch.
pub fn bytes_with_sharding(rank: &Rank) -> Outcome {
    let config = deep(Dtype::Float32);
    for (zero_stage, schedule) in [(1, "1f1b"), (2, "zb-h1"), (3, "1f1b"), (3, "interleaved")] {
        let config = sharded(&piped(&config, 2, schedule), zero_stage);
        check(rank, &config)?;
    }
    let mut lean = sharded(&piped(&config, 2, "1f1b"), 3);
    lean.parallelism.pipeline_parallel_reduce = PipelineReduce::Each;
    check(rank, &lean)
}

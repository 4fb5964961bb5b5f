//! A job with expert parallelism, compared with one rank.

use trainyard_config::{
    ActivationCheckpointMode, Config, ContextMethod, Dtype, Offload, OffloadStates,
};
use trainyard_conformance::training::{
    Tolerance, agreed_fingerprint, divided, on_rank_0, reference, train_on,
};
use trainyard_conformance::{Outcome, Rank};
use trainyard_train::data_axes;

use super::job::{deepseek, job, laid_out, mixtral, with};

/// Trains every variant on all ranks, with one and with two micro-batches. All ranks agree to the bit, and with one rank
/// within the tolerance of the type.
fn equal_one_rank(rank: &Rank, config: &Config, variants: &[Config]) -> Outcome {
    let expected = on_rank_0(rank, || reference(&config.on_one_rank()))?;
    for (number, variant) in variants.iter().enumerate() {
        let num_data_ranks = variant.mesh(rank.size())?.size_of(data_axes());
        let variant = divided(variant, num_data_ranks, 1 + number % 2);
        let run = train_on(rank, &variant)?;
        agreed_fingerprint(rank, &run)?;
        if let Some(expected) = &expected {
            run.assert_agrees(expected, Tolerance::of(config.training.dtype));
        }
    }
    Ok(())
}

/// Every degree of expert parallelism, with and without replicas.
fn layouts(rank: &Rank, config: &Config, stage: usize) -> Vec<Config> {
    let size = rank.size() as i64;
    let mut all = vec![
        laid_out(config, size, size, 1, stage),
        laid_out(config, size, size, 1, stage),
        laid_out(config, 1, size, 1, stage),
    ];
    if size > 2 {
        all.push(laid_out(config, 2, size, 1, stage));
        all.push(laid_out(config, 2, 2, size / 2, stage));
        all.push(laid_out(config, 2, 2, size / 2, stage));
    }
    all
}

/// The dense parameters are sharded in every stage, and experts are whole.
pub fn whole_experts(rank: &Rank) -> Outcome {
    let mut config = job(Dtype::Float64);
    config.parallelism.shard_experts = false;
    for stage in [1, 2, 3] {
        equal_one_rank(rank, &config, &layouts(rank, &config, stage))?;
    }
    Ok(())
}

/// Offloaded states give the same bits: with sharded and with whole experts, with and without master weights.
pub fn offloaded(rank: &Rank) -> Outcome {
    let all = [OffloadStates::All, OffloadStates::Optimizer];
    for (stage, shard_experts, states) in [
        (3, true, &all[..]),
        (3, false, &all[..]),
        (1, true, &all[1..]),
    ] {
        for compute in [None, Some(Dtype::Bfloat16)] {
            let config = laid_out(&job(Dtype::Float32), 2, rank.size() as i64, 1, stage);
            let mut config = divided(&config, rank.size(), 1);
            config.training.steps = 3;
            config.training.mixed_precision_param = compute;
            config.parallelism.shard_experts = shard_experts;
            let expected = train_on(rank, &config)?.fingerprint();
            config.parallelism.offload = Offload::Cpu;
            for states in states {
                config.parallelism.offload_states = *states;
                let found = train_on(rank, &config)?.fingerprint();
                assert!(found == expected, "stage {stage}, {states:?}, {compute:?}");
            }
        }
    }
    Ok(())
}

/// Only experts are sharded.
pub fn experts(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float64);
    equal_one_rank(rank, &config, &layouts(rank, &config, 0))
}

/// Nodes of some ranks each: a token is sent to each node once.
pub fn machines(rank: &Rank) -> Outcome {
    let size = rank.size() as i64;
    let on_machines = |config: &Config, length| {
        let mut config = laid_out(config, size, size, 1, 0);
        config.parallelism.expert_parallel_local_degree = length;
        config
    };
    let dropping = with(&job(Dtype::Float64), |moe| moe.capacity_factor = Some(0.8));
    let mut skewed = deepseek(Dtype::Float64);
    skewed.debug.routing_skew = 1e3;
    for config in [deepseek(Dtype::Float64), dropping, skewed] {
        let mut variants: Vec<Config> = (1..rank.size())
            .filter(|length| rank.size().is_multiple_of(*length))
            .map(|length| on_machines(&config, length))
            .collect();
        // Also with two micro-batches.
        variants.push(variants[0].clone());
        equal_one_rank(rank, &config, &variants)?;
    }
    Ok(())
}

/// Other kinds of routers.
pub fn families(rank: &Rank) -> Outcome {
    let size = rank.size() as i64;
    for config in [mixtral(Dtype::Float64), deepseek(Dtype::Float64)] {
        let laid_out = laid_out(&config, size, size, 1, 0);
        equal_one_rank(rank, &config, &[laid_out.clone(), laid_out])?;
    }
    Ok(())
}

/// From a slight skew to all tokens at the same experts, so that some ranks get no token.
pub fn skewed(rank: &Rank) -> Outcome {
    let size = rank.size() as i64;
    for (skew, chosen) in [(0.05, 2), (1e3, 2), (1e3, 1)] {
        let mut config = with(&job(Dtype::Float64), |moe| {
            moe.num_experts_per_tok = Some(chosen);
        });
        config.training.steps = 3;
        config.debug.routing_skew = skew;
        equal_one_rank(rank, &config, &[laid_out(&config, size, size, 1, 0)])?;
    }
    Ok(())
}

/// Experts with less capacity than tokens.
pub fn dropped(rank: &Rank) -> Outcome {
    let size = rank.size() as i64;
    let config = with(&job(Dtype::Float64), |moe| moe.capacity_factor = Some(0.8));
    let laid_out = laid_out(&config, size, size, 1, 0);
    equal_one_rank(rank, &config, &[laid_out.clone(), laid_out])
}

/// In single precision, without load-balancing losses: rounding can change their counts by a whole token.
pub fn fp32(rank: &Rank) -> Outcome {
    let size = rank.size() as i64;
    let mut config = job(Dtype::Float32);
    config.training.steps = 2;
    equal_one_rank(rank, &config, &[laid_out(&config, size, size, 1, 0)])
}

/// Backward dispatches tokens again, in the same order on every rank; the bias is updated once.
pub fn recomputation(rank: &Rank) -> Outcome {
    let size = rank.size() as i64;
    let mut prints = Vec::new();
    for mode in [
        ActivationCheckpointMode::None,
        ActivationCheckpointMode::Selective,
        ActivationCheckpointMode::Full,
    ] {
        let mut config = laid_out(&deepseek(Dtype::Float32), size, size, 1, 0);
        config = divided(&config, rank.size(), 2);
        config.training.steps = 4;
        config.activation_checkpoint.mode = mode;
        prints.push(agreed_fingerprint(rank, &train_on(rank, &config)?)?);
    }
    assert!(prints.iter().all(|print| *print == prints[0]));
    Ok(())
}

/// ZeRO 1, 2 and 3: experts are sharded over the ranks with the same experts, the rest over all ranks.
pub fn sharded(rank: &Rank) -> Outcome {
    for stage in [1, 2, 3] {
        let config = deepseek(Dtype::Float64);
        equal_one_rank(rank, &config, &layouts(rank, &config, stage))?;
    }
    Ok(())
}

fn tensor_parallel(config: &Config, degree: i64, regathers: bool) -> Config {
    let mut config = config.clone();
    config.parallelism.tensor_parallel_degree = degree;
    config.parallelism.sequence_parallel_regather = regathers;
    config
}

/// Expert parallelism over tensor-parallel ranks, over data-parallel ranks, and over both.
pub fn tensor(rank: &Rank) -> Outcome {
    for config in [job(Dtype::Float64), mixtral(Dtype::Float64)] {
        let tp = tensor_parallel(&config, 2, false);
        let variants = [
            laid_out(&tp, 1, 2, 1, 0),
            laid_out(&tp, 2, 2, 1, 0),
            laid_out(&tp, 4, 2, 1, 0),
            laid_out(&tp, 2, 1, 2, 0),
            laid_out(&tp, 2, 2, 1, 3),
            laid_out(&tp, 4, 2, 1, 1),
            laid_out(&tensor_parallel(&config, 2, true), 2, 2, 1, 2),
            laid_out(&tensor_parallel(&config, 4, false), 4, 1, 1, 0),
        ];
        equal_one_rank(rank, &config, &variants)?;
    }
    Ok(())
}

/// The same with context parallelism.
pub fn context(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float64);
    let variants = [ContextMethod::Ring, ContextMethod::Ulysses].map(|method| {
        let mut config = laid_out(&config, 2, 2, 1, 3);
        config.parallelism.context_parallel_degree = 2;
        config.parallelism.context_parallel_method = method;
        config
    });
    let four = laid_out(&variants[0], 4, 2, 1, 0);
    equal_one_rank(rank, &config, &[&variants[..], &[four]].concat())
}

fn pipelined(config: &Config, schedule: &str) -> Config {
    let mut config = config.clone();
    config.parallelism.pipeline_parallel_degree = 2;
    config.parallelism.pipeline_parallel_schedule = schedule.to_owned();
    config
}

/// Expert parallelism within every pipeline stage.
pub fn pipeline(rank: &Rank) -> Outcome {
    let config = deepseek(Dtype::Float64);
    let expected = on_rank_0(rank, || reference(&config.on_one_rank()))?;
    for (schedule, stage) in [("1F1B", 0), ("1F1B", 3), ("zb-h1", 0), ("interleaved", 1)] {
        let variant = laid_out(&pipelined(&config, schedule), 2, 2, 1, stage);
        let run = train_on(rank, &divided(&variant, 2, 4))?;
        agreed_fingerprint(rank, &run)?;
        if let Some(expected) = &expected {
            run.assert_agrees(expected, Tolerance::of(Dtype::Float64));
        }
    }
    Ok(())
}

/// Eight ranks: pipelines with tensor parallelism, and replicas of sharded models.
pub fn several_axes(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float64);
    let expected = on_rank_0(rank, || reference(&config.on_one_rank()))?;
    let tp = tensor_parallel(&config, 2, false);
    for (variant, num_microbatches) in [
        (laid_out(&pipelined(&tp, "1F1B"), 4, 2, 1, 0), 4),
        (laid_out(&pipelined(&tp, "1F1B"), 2, 2, 1, 3), 4),
        (laid_out(&tp, 2, 2, 2, 3), 1),
        (laid_out(&config, 4, 4, 2, 2), 1),
        (laid_out(&config, 8, 8, 1, 0), 1),
    ] {
        let num_data_ranks = variant.mesh(rank.size())?.size_of(data_axes());
        let run = train_on(rank, &divided(&variant, num_data_ranks, num_microbatches))?;
        agreed_fingerprint(rank, &run)?;
        if let Some(expected) = &expected {
            run.assert_agrees(expected, Tolerance::of(Dtype::Float64));
        }
    }
    Ok(())
}

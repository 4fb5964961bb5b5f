//! Losses, gradient norms and every parameter, for every stage.

use std::error::Error;

use trainyard_config::{Config, Dtype, ReshardAfterForward};
use trainyard_conformance::training::{
    Session, Tolerance, Trained, agreed_fingerprint, assert_close, debug_llama, divided, on_rank_0,
    reference,
};
use trainyard_conformance::{Outcome, Rank, is_full_run};
use trainyard_torch::World;
use trainyard_trace::Ledger;

use super::bytes::sharded;

const STAGES: [usize; 3] = [1, 2, 3];

pub fn fp64(rank: &Rank) -> Outcome {
    equals_one_rank(rank, debug_llama(Dtype::Float64), Dtype::Float64)
}

pub fn fp32(rank: &Rank) -> Outcome {
    equals_one_rank(rank, debug_llama(Dtype::Float32), Dtype::Float32)
}

/// Compared with one rank that also computes in bfloat16. The order of its sums differs, and each is rounded to 8 bits:
/// over ten steps that explains a few percent.
pub fn bf16(rank: &Rank) -> Outcome {
    let mut config = debug_llama(Dtype::Float32);
    config.training.mixed_precision_param = Some(Dtype::Bfloat16);
    config.training.steps = 10;
    equals_one_rank(rank, config.clone(), Dtype::Bfloat16)?;
    config.training.mixed_precision_reduce = Some(Dtype::Bfloat16);
    equals_one_rank(rank, config, Dtype::Bfloat16)
}

/// Stage, micro-batches, clipping: every pair of settings, or all combinations in a full CI run.
fn matrix() -> Vec<(usize, usize, f64)> {
    if !is_full_run() {
        return vec![
            (1, 1, 1.0),
            (1, 2, 0.0),
            (2, 1, 0.0),
            (2, 2, 1.0),
            (3, 1, 1.0),
            (3, 2, 0.0),
        ];
    }
    let all = STAGES.into_iter().flat_map(|stage| {
        let microbatches = [1, 2].into_iter();
        microbatches.flat_map(move |num| [(stage, num, 1.0), (stage, num, 0.0)])
    });
    all.collect()
}

/// Every stage, with and without accumulation and clipping; all ranks agree to the bit.
fn equals_one_rank(rank: &Rank, config: Config, dtype: Dtype) -> Outcome {
    let mut expected: Vec<(f64, Option<Trained>)> = Vec::new();
    for (stage, num_microbatches, max_norm) in matrix() {
        let mut config = config.clone();
        config.training.max_norm = max_norm;
        if !expected.iter().any(|(known, _)| *known == max_norm) {
            expected.push((max_norm, on_rank_0(rank, || reference(&config))?));
        }
        let mut config = divided(&config, rank.size(), num_microbatches);
        config.parallelism.zero_stage = stage;
        let run = sharded(rank, &mut config, 1)?;
        agreed_fingerprint(rank, &run)?;
        let reference = expected.iter().find(|(known, _)| *known == max_norm);
        if let Some((_, Some(reference))) = reference {
            run.assert_agrees(reference, Tolerance::of(dtype));
        }
    }
    Ok(())
}

/// The schedule of gathers and reductions affects only time.
pub fn schedules(rank: &Rank) -> Outcome {
    let config = divided(&debug_llama(Dtype::Float32), rank.size(), 2);
    for stage in STAGES {
        let mut prints = Vec::new();
        let run = |change: &dyn Fn(&mut Config)| -> Result<Vec<u64>, Box<dyn Error>> {
            let mut config = config.clone();
            config.training.steps = 6;
            config.parallelism.zero_stage = stage;
            change(&mut config);
            agreed_fingerprint(rank, &sharded(rank, &mut config, 1)?)
        };
        prints.push(run(&|c| c.parallelism.overlap = false)?);
        for prefetch in [0, 1, 2] {
            prints.push(run(&|c| c.parallelism.fsdp_prefetch = prefetch)?);
        }
        for reshard in [ReshardAfterForward::Always, ReshardAfterForward::Never] {
            prints.push(run(&|c| {
                c.parallelism.fsdp_reshard_after_forward = reshard;
            })?);
        }
        assert!(
            prints.iter().all(|print| *print == prints[0]),
            "stage {stage}: a schedule changes the result"
        );
    }
    Ok(())
}

/// An embedding that the first and the last unit share.
pub fn tied(rank: &Rank) -> Outcome {
    let mut config = debug_llama(Dtype::Float64);
    config.model.tie_word_embeddings = Some(true);
    config.training.steps = 6;
    equals_one_rank(rank, config, Dtype::Float64)
}

/// Several units in one flat parameter: some, and all with a tied embedding among them.
pub fn merged(rank: &Rank) -> Outcome {
    for (bytes, is_tied) in [(1_000_000, false), (u64::MAX, true)] {
        let mut config = debug_llama(Dtype::Float64);
        config.model.tie_word_embeddings = Some(is_tied);
        config.training.steps = 6;
        config.parallelism.reduce_bucket_size = Some(bytes);
        equals_one_rank(rank, config, Dtype::Float64)?;
    }
    Ok(())
}

/// Forward passes without backward, between steps.
pub fn evaluation(rank: &Rank) -> Outcome {
    let losses = |config: &Config, world: &World| -> Result<Vec<f64>, Box<dyn Error>> {
        let mut session = Session::new(config, world)?;
        let mut losses = Vec::new();
        for _ in 0..3 {
            let batches = session.batches()?;
            losses.push(session.trainer.evaluate(&batches)?);
            session.step()?;
        }
        Ok(losses)
    };
    let config = debug_llama(Dtype::Float64);
    let expected = losses(
        &divided(&config, 1, 1),
        &World::single_rank(Ledger::new(0))?,
    )?;
    for stage in STAGES {
        let mut config = divided(&config, rank.size(), 1);
        config.parallelism.zero_stage = stage;
        config.parallelism.data_parallel_shard_degree = -1;
        let world = rank.join_config(&config)?;
        assert_close("loss", &losses(&config, &world)?, &expected, 1e-9);
    }
    Ok(())
}

/// Two replicas of two shards.
pub fn hybrid(rank: &Rank) -> Outcome {
    let config = debug_llama(Dtype::Float64);
    let expected = on_rank_0(rank, || reference(&config))?;
    for stage in STAGES {
        for num_microbatches in [1, 2] {
            let mut config = divided(&config, rank.size(), num_microbatches);
            config.parallelism.zero_stage = stage;
            let run = sharded(rank, &mut config, 2)?;
            agreed_fingerprint(rank, &run)?;
            if let Some(expected) = &expected {
                run.assert_agrees(expected, Tolerance::of(Dtype::Float64));
            }
        }
    }
    Ok(())
}

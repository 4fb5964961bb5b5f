//! The memory of a rank, counted by the allocator.

use trainyard_config::{Config, Dtype};
use trainyard_conformance::training::{Session, debug_llama, divided};
use trainyard_conformance::{Outcome, Rank};
use trainyard_cost::{ShardedModel, StateBytes};
use trainyard_parallel::FullyShard;
use trainyard_torch::memory;
use trainyard_train::{Trainer, build};

/// Between steps, to the byte, for every stage and combination of types.
pub fn states(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu("memory by kind is counted on the host only") {
        return Ok(());
    }
    memory::observe();
    let bf16 = Some(Dtype::Bfloat16);
    for stage in [1, 2, 3] {
        for (param, reduce) in [(None, None), (bf16, None), (bf16, bf16)] {
            let mut config = configured(rank, stage);
            config.training.mixed_precision_param = param;
            config.training.mixed_precision_reduce = reduce;
            let world = rank.join_config(&config)?;
            let before = memory::report()?.allocated;
            let model = build::model(&(&config).into(), &world, world.device().into())?;
            let model = FullyShard::new(model, &world, build::shard_options(&config))?;
            let formulas = model.formulas().next().ok_or("nothing is sharded")?;
            let states = formulas.states();
            let most = most_buffers(formulas, &config);
            let trainer = Trainer::with_strategy(&(&config).into(), &world, Box::new(model))?;
            let mut session = Session::with_trainer(&config, &world, trainer)?;
            for _ in 0..2 {
                session.step()?;
            }
            let after = memory::report()?.allocated;
            let grown = |kind: usize| after[kind] - before[kind];
            // The optimizer keeps a step counter per parameter.
            let steps = 4 * session.trainer.parameters().len() as u64;
            let trainer = &session.trainer;
            let moments = trainer.optimizer().moment_bytes(trainer.parameters());
            let expected = StateBytes {
                optimizer: states.optimizer + moments,
                ..states
            };
            let found = StateBytes {
                parameters: grown(0),
                gradients: grown(1),
                optimizer: grown(2) - steps,
            };
            assert_eq!(found, expected, "stage {stage}, {param:?}, {reduce:?}");
            let buffers = grown(4);
            assert!(
                buffers <= most,
                "stage {stage}: {buffers} bytes of buffers, not {most}"
            );
        }
    }
    Ok(())
}

/// The largest flat parameter, as often as a step may need it at the same time, and receive buffers: those of the
/// gradients, and of two numbers that all ranks of the world exchange.
fn most_buffers(model: &ShardedModel, config: &Config) -> u64 {
    let longest = model.flat_sizes.iter().max().copied().unwrap_or(0);
    let row = longest * model.widths.param.max(model.widths.reduce);
    let num_peers = model.num_shards as u64 - 1;
    let room = 2 * num_peers * longest.div_ceil(model.num_shards as u64) * model.widths.reduce;
    let counts = 2 * 8 * num_peers;
    (2 + config.parallelism.fsdp_prefetch as u64) * row + room + counts
}

/// Buffers are allocated in the first step only.
pub fn steady(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu("memory by kind is counted on the host only") {
        return Ok(());
    }
    memory::observe();
    for stage in [1, 2, 3] {
        let config = configured(rank, stage);
        let world = rank.join_config(&config)?;
        let mut session = Session::new(&config, &world)?;
        session.step()?;
        let batches = session.batches()?;
        let (stepped, allocations) = memory::record(|| session.trainer.step(&batches));
        stepped?;
        let taken: Vec<_> = allocations
            .iter()
            .filter(|a| a.kind == trainyard_trace::MemoryKind::Communication && a.bytes > 0)
            .collect();
        assert!(taken.is_empty(), "stage {stage}: {taken:?}");
    }
    Ok(())
}

fn configured(rank: &Rank, stage: usize) -> Config {
    let mut config = divided(&debug_llama(Dtype::Float32), rank.size(), 1);
    config.parallelism.data_parallel_shard_degree = -1;
    config.parallelism.zero_stage = stage;
    config
}

//! Memory by the formulas of the planner, compared with a dry run of the code.

use std::error::Error;

use libtest_mimic::Trial;
use trainyard_arch::{DecoderConfig, Flavor};
use trainyard_config::Config;
use trainyard_conformance::{as_trials, is_full_run};
use trainyard_interop::Framework;
use trainyard_plan::{
    Degrees, Offload, PipelineLayout, PrecisionByStage, Recompute, States, Strategy,
    Synchronization,
};
use trainyard_schedule::ScheduleKind;
use trainyard_train::dry_run::dry_run;

fn strategy(degrees: Degrees, zero_stage: usize) -> Strategy {
    Strategy {
        degrees,
        zero_stage,
        sequence_parallel: degrees.tp > 1,
        pipeline: PipelineLayout {
            schedule: ScheduleKind::OneForwardOneBackward,
            stages_per_rank: 1,
        },
        global_batch: 4 * degrees.data_parallel() * degrees.pp,
        micro_batch: 1,
        seq_len: 2048,
        recompute: Recompute::None,
        offload: Offload::None,
        precision: PrecisionByStage::trainyard(2, 4).at(zero_stage),
        synchronization: Synchronization::PLAIN,
        split_points: Vec::new(),
    }
}

/// Replicas, tensor parallelism and pipelines, alone and combined, on up to 16,384 ranks; and sharded states, also where
/// flat parameters are padded. The largest model is for full CI runs only.
fn cases() -> Vec<(Flavor, Strategy)> {
    let whole = |pp, dp_replicate, tp| Degrees {
        pp,
        dp_replicate,
        tp,
        ..Degrees::ONE
    };
    let sharded = |pp, dp_replicate, dp_shard, cp, tp| Degrees {
        dp_shard,
        cp,
        ..whole(pp, dp_replicate, tp)
    };
    [
        (Flavor::Llama3_8b, whole(1, 8, 1), 0),
        (Flavor::Llama3_8b, whole(1, 1, 8), 0),
        (Flavor::Llama3_8b, whole(4, 1, 2), 0),
        (Flavor::Llama3_70b, whole(1, 16, 8), 0),
        (Flavor::Llama3_70b, whole(8, 4, 4), 0),
        (Flavor::Llama3_405b, whole(16, 128, 8), 0),
        (Flavor::Llama3_8b, sharded(1, 1, 64, 1, 1), 1),
        (Flavor::Llama3_8b, sharded(1, 1, 64, 1, 1), 2),
        (Flavor::Llama3_8b, sharded(1, 1, 64, 1, 1), 3),
        (Flavor::Llama3_8b, sharded(1, 2, 12, 1, 2), 1),
        (Flavor::Llama3_8b, sharded(1, 2, 12, 1, 2), 3),
        (Flavor::Llama3_8b, sharded(1, 1, 6, 2, 1), 2),
        (Flavor::Llama3_70b, sharded(8, 1, 14, 1, 4), 1),
        (Flavor::Llama3_70b, sharded(8, 1, 14, 1, 4), 3),
        (Flavor::Llama3_405b, sharded(16, 1, 128, 1, 8), 1),
        (Flavor::Llama3_405b, sharded(16, 1, 64, 2, 8), 2),
        (Flavor::Llama3_405b, sharded(1, 16, 128, 1, 8), 3),
    ]
    .into_iter()
    .filter(|(flavor, ..)| is_full_run() || *flavor != Flavor::Llama3_405b)
    .map(|(flavor, degrees, zero_stage)| (flavor, strategy(degrees, zero_stage)))
    .collect()
}

/// The tests of this module.
pub fn trials() -> Vec<Trial> {
    as_trials(
        "planned",
        &[(
            "state_memory_equals_a_dry_run",
            state_memory_equals_a_dry_run,
        )],
    )
}

/// Parameters and optimizer states of a rank are equal to the byte, for the first, a middle and the last rank of a
/// pipeline; so are gradients, where the code keeps them between steps.
fn state_memory_equals_a_dry_run() -> Result<(), Box<dyn Error>> {
    for (flavor, strategy) in cases() {
        let shape = DecoderConfig::from(flavor);
        let world = strategy.degrees.world_size();
        let written = Framework::Trainyard.write(&shape, &strategy, world)?;
        assert_eq!(written.deviations, []);
        let config = Config::parse(&written.text, &[])?;
        for rank_layers in strategy.layers_by_class(&shape) {
            let planned = States::of(&shape, &strategy, &rank_layers);
            let rank = rank_layers.rank * (world / strategy.degrees.pp);
            let held = dry_run(&(&config).into(), world, rank)?.states;
            let mut planned = [planned.parameters, planned.gradients, planned.optimizer];
            let held = [held.parameters, held.gradients, held.optimizer].map(|bytes| bytes as f64);
            if held[1] == 0.0 {
                planned[1] = 0.0;
            }
            println!(
                "{flavor:?} {} stage {} {}: {planned:?} {held:?}",
                strategy.degrees,
                strategy.zero_stage,
                rank_layers.class.name()
            );
            assert_eq!(planned, held, "{flavor:?} {:?}", strategy.degrees);
        }
    }
    Ok(())
}

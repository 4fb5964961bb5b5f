//! What the planner says of memory, against the code that would run the plan.

use std::error::Error;

use trainyard_config::Config;
use trainyard_config::{Flavor, LlamaConfig};
use trainyard_plan::{
    Degrees, Framework, Held, Layers, Offload, Recompute, Shape, States, Strategy,
};
use trainyard_schedule::Kind;
use trainyard_train::dry_run::dry_run;

fn strategy(degrees: Degrees, zero_stage: usize) -> Strategy {
    Strategy {
        degrees,
        zero_stage,
        sequence_parallel: degrees.tp > 1,
        layers: Layers {
            schedule: Kind::OneForwardOneBackward,
            stages_per_rank: 1,
        },
        global_batch: 4 * degrees.data_parallel() * degrees.pp,
        micro_batch: 1,
        seq_len: 2048,
        recompute: Recompute::None,
        offload: Offload::None,
        precision: Held::ours(2, 4).at(zero_stage),
    }
}

/// Copies, shared matrices and pipelines, alone and together, on up to 16,384 ranks; and states that ranks
/// shard, also where a unit's parameters do not divide and are padded.
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
    .map(|(flavor, degrees, zero_stage)| (flavor, strategy(degrees, zero_stage)))
    .to_vec()
}

/// Parameters and the optimiser's states of a rank, equal to the byte, for the first, a middle and the last
/// rank of a pipeline; gradients too where the code keeps them from step to step.
#[test]
fn states_by_formula_are_those_of_the_code() -> Result<(), Box<dyn Error>> {
    for (flavor, strategy) in cases() {
        let shape = Shape::from(&LlamaConfig::of(flavor));
        let world = strategy.degrees.world_size();
        let written = Framework::Trainyard.write(&shape, &strategy, world)?;
        assert_eq!(written.losses, []);
        let config = Config::parse(&written.text, &[])?;
        for holding in strategy.holdings(&shape) {
            let planned = States::of(&shape, &strategy, &holding);
            let rank = holding.rank * (world / strategy.degrees.pp);
            let held = dry_run(&config, world, rank)?.states;
            let mut planned = [planned.parameters, planned.gradients, planned.optimizer];
            let held = [held.parameters, held.gradients, held.optimizer].map(|bytes| bytes as f64);
            if held[1] == 0.0 {
                planned[1] = 0.0;
            }
            println!(
                "{flavor:?} {} stage {} {}: {planned:?} {held:?}",
                strategy.degrees,
                strategy.zero_stage,
                holding.class.name()
            );
            assert_eq!(planned, held, "{flavor:?} {:?}", strategy.degrees);
        }
    }
    Ok(())
}

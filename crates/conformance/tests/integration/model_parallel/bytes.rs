//! Bytes that layers send, counted by the ledger and by the kernel.

use trainyard_config::{Config, ContextMethod, Dtype};
use trainyard_conformance::training::{Session, divided, finish};
use trainyard_conformance::{Outcome, Rank};
use trainyard_trace::{CollectiveKind, Purpose};

use super::equality::{
    METHODS, SEQUENCES, SequenceParallel, context_parallel, job, num_data_ranks, tensor_parallel,
};

/// Per block and step: four all-reduces of batch · sequence · hidden elements, or four pairs of a reduce-scatter and an
/// all-gather; counted on models of two and of three blocks.
pub fn tensor(rank: &Rank) -> Outcome {
    let config = job(Dtype::Float32);
    for sequence in SEQUENCES {
        check(rank, &tensor_parallel(&config, rank.size(), sequence))?;
    }
    let positions = 24 * 32 * 64 * 4;
    for sequence in [SequenceParallel::Disabled, SequenceParallel::SaveGathered] {
        let counted = |num_layers: usize| {
            let mut config = tensor_parallel(&config, rank.size(), sequence);
            config.model.num_hidden_layers = Some(num_layers);
            collectives(rank, &config)
        };
        let (two, three) = (counted(2)?, counted(3)?);
        let of_a_block = |kind: usize| {
            let [(count, bytes), (before, less)] = [three[kind], two[kind]];
            (count - before, bytes - less)
        };
        let [all_reduces, scatters, gathers] = [0, 1, 2].map(of_a_block);
        match sequence {
            SequenceParallel::Disabled => assert_eq!(all_reduces, (4, 4 * positions)),
            _ => assert_eq!([scatters, gathers], [(4, 4 * positions); 2]),
        }
    }
    Ok(())
}

/// The number and size of all-reduces, reduce-scatters and all-gathers of activations in one step.
fn collectives(
    rank: &Rank,
    config: &Config,
) -> Result<Vec<(u64, u64)>, Box<dyn std::error::Error>> {
    let mut config = divided(config, 1, 1);
    config.training.steps = 1;
    let world = rank.join_config(&config)?;
    let run = finish(Session::new(&config, &world)?, &config, &world)?;
    let kinds = [
        CollectiveKind::AllReduce,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllGather,
    ];
    let of = |kind| {
        let found = run.totals.collectives.get(&(kind, Purpose::Activation));
        found.map_or((0, 0), |total| (total.count, total.payload_bytes))
    };
    Ok(kinds.map(of).to_vec())
}

/// Ring: keys and values in forward, those and their gradients in backward. Ulysses: its all-to-alls.
pub fn context(rank: &Rank) -> Outcome {
    for method in METHODS {
        let config = context_parallel(&job(Dtype::Float32), rank.size(), method);
        check(rank, &config)?;
    }
    // One case in plain numbers, in addition to the formula: 2 blocks, keys of width 32, 4 bytes, 8 steps.
    let config = context_parallel(&job(Dtype::Float32), rank.size(), ContextMethod::Ring);
    let run = trainyard_conformance::training::train_on(rank, &divided(&config, 1, 1))?;
    let own = run.totals.of_purpose(Purpose::Activation).sent_bytes;
    let keys = 24 * (32 / rank.size() as u64) * 32 * 4;
    assert_eq!(own, 8 * 2 * 3 * 2 * (rank.size() as u64 - 1) * keys);
    Ok(())
}

/// Activations, gradients and parameters by closed form, and their sum by the counters of the kernel.
pub fn check(rank: &Rank, config: &Config) -> Outcome {
    let mut config = divided(config, num_data_ranks(rank, config)?, 2);
    config.training.steps = 3;
    let world = rank.join_config(&config)?;
    let session = Session::new(&config, &world)?;
    let num_tokens = 24 * 32;
    let expected = session.trainer.model().layer_comm_bytes(num_tokens);
    let expected = expected.ok_or("a decoder has a closed form")?;
    let run = finish(session, &config, &world)?;
    run.assert_bytes(rank, expected, &format!("{:?}", config.parallelism))
}

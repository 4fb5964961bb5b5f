//! Uneven ranks: some have more rows than others, or more targets in them.

use std::collections::BTreeMap;
use std::error::Error;
use std::ops::Range;

use tch::{Device, Tensor};
use trainyard_config::{Config, Dtype};
use trainyard_conformance::training::{
    Session, assert_close, debug_llama, distance, divided, fingerprint, values,
};
use trainyard_conformance::{Outcome, Rank};
use trainyard_data::{Batch, collate};
use trainyard_torch::World;
use trainyard_trace::Ledger;
use trainyard_train::build;

const NUM_STEPS: u64 = 5;

/// The target that the loss ignores.
const NO_TARGET: i64 = -100;

/// How the rows of a step are divided over ranks.
struct Division {
    /// The first row of a rank; its rows end at the first row of the next rank.
    first_row: fn(usize) -> usize,
    prepare: fn(&mut Batch, Range<usize>),
}

/// One row for rank 0, two for rank 1, and so on.
pub fn uneven_batches(rank: &Rank) -> Outcome {
    equals_one_rank(
        rank,
        &Division {
            first_row: |index| index * (index + 1) / 2,
            prepare: |_, _| {},
        },
    )
}

/// Three rows each, some with masked targets.
pub fn masked_targets(rank: &Rank) -> Outcome {
    equals_one_rank(
        rank,
        &Division {
            first_row: |index| 3 * index,
            prepare: mask,
        },
    )
}

fn mask(batch: &mut Batch, rows: Range<usize>) {
    for (place, row) in rows.enumerate() {
        let num_masked = 3 * (row % 5) as i64;
        let row = batch.targets.get(place as i64);
        let _ = row.narrow(0, 0, num_masked).fill_(NO_TARGET);
        batch.num_targets -= num_masked;
    }
}

fn equals_one_rank(rank: &Rank, division: &Division) -> Outcome {
    let rows = (division.first_row)(rank.index())..(division.first_row)(rank.index() + 1);
    let found = train(&*rank.world()?, rows, division)?;
    let prints: Vec<u64> = found.parameters.values().map(fingerprint).collect();
    let all = rank.all_gather(&prints)?;
    assert!(all.iter().all(|each| *each == prints), "ranks differ");
    if rank.index() == 0 {
        let all_rows = 0..(division.first_row)(rank.size());
        let expected = train(&World::single_rank(Ledger::new(0))?, all_rows, division)?;
        assert_close("loss", &found.losses, &expected.losses, 1e-9);
        assert_close(
            "gradient norm",
            &found.grad_norms,
            &expected.grad_norms,
            1e-9,
        );
        for (name, expected) in &expected.parameters {
            let off = distance(&found.parameters[name], expected);
            assert!(off <= 1e-9, "{name} is off by {off:e}");
        }
    }
    Ok(())
}

struct TrainedRows {
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    parameters: BTreeMap<String, Tensor>,
}

/// Trains on these rows of every step.
fn train(
    world: &World,
    rows: Range<usize>,
    division: &Division,
) -> Result<TrainedRows, Box<dyn Error>> {
    let config = divided(&debug_llama(Dtype::Float64), world.size(), 1);
    let mut trainer = Session::new(&config, world)?.trainer;
    let (mut losses, mut grad_norms) = (Vec::new(), Vec::new());
    for step in 0..NUM_STEPS {
        let mut batch = samples(&config, step, rows.clone(), world.device())?;
        (division.prepare)(&mut batch, rows.clone());
        let outcome = trainer.step(&[batch])?;
        losses.push(trainer.global_loss(&outcome.local_loss)?);
        grad_norms.push(f64::try_from(&outcome.grad_norm)?);
    }
    Ok(TrainedRows {
        losses,
        grad_norms,
        parameters: values(trainer.parameters()),
    })
}

fn samples(
    config: &Config,
    step: u64,
    rows: Range<usize>,
    device: Device,
) -> Result<Batch, Box<dyn Error>> {
    let source = build::source(&config.into(), build::Phase::Training)?;
    let samples = rows
        .map(|row| source.sample(100 * step + row as u64))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(collate(&samples, device)?)
}

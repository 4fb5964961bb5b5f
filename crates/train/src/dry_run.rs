//! A dry run: the real code, one rank, on tensors without memory and groups that send nothing.
//!
//! What it reports is read off the same observers and the same ledger that a real run writes, so it
//! cannot drift from what runs.

use std::collections::BTreeMap;

use serde::Serialize;
use tch::Kind;
use trainyard_config::{Config, ModelSpec};
use trainyard_data::{Batch, IMAGE_SIDE};
use trainyard_nn::{Module, Place};
use trainyard_torch::{World, memory, operators};
use trainyard_trace::{CollectiveKind, Ledger, Purpose};

use crate::build;
use crate::error::Result;
use crate::trainer::Trainer;

/// One rank's step, in figures.
#[derive(Debug, Clone, Serialize)]
pub struct DryRun {
    /// Ranks in the world.
    pub world_size: usize,
    /// The rank that was followed.
    pub rank: usize,
    /// The mesh of the world.
    pub mesh: String,
    /// Parameters of the whole model.
    pub num_parameters: u64,
    /// The most bytes this rank holds at once during a step.
    pub peak_bytes: u64,
    /// What those bytes are.
    pub bytes_by_kind: BTreeMap<String, u64>,
    /// What is communicated in a step.
    pub collectives: Vec<CollectiveRow>,
    /// Floating-point operations of this rank in a step.
    pub flops: u64,
    /// Operators that ran in a step.
    pub num_operators: usize,
}

/// Collectives of one kind and purpose in a step.
#[derive(Debug, Clone, Serialize)]
pub struct CollectiveRow {
    /// Which collective.
    pub kind: CollectiveKind,
    /// What for.
    pub purpose: Purpose,
    /// How many.
    pub count: u64,
    /// Bytes of the tensors.
    pub payload_bytes: u64,
    /// Bytes this rank sends.
    pub sent_bytes: u64,
}

/// Follows one step of `rank` in a world of `world_size`.
pub fn dry_run(config: &Config, world_size: usize, rank: usize) -> Result<DryRun> {
    memory::observe();
    let mesh = config.mesh(world_size)?;
    let ledger = Ledger::new(rank);
    let world = World::fake(mesh, rank, ledger.clone())?;
    let mut trainer = Trainer::new(config, &world, Place::Meta)?;
    let batching = *trainer.batching();
    let batches = (0..batching.num_microbatches)
        .map(|_| meta_batch(config, batching.local))
        .collect::<Result<Vec<_>>>()?;
    // The first step brings the optimiser's state into being; the second is like all that follow.
    trainer.step(&batches)?;
    memory::reset_peak();
    let before = ledger.totals();
    let (stepped, operators) = operators::record(|| trainer.step(&batches))?;
    stepped?;
    let totals = ledger.totals() - before;
    let report = memory::report()?;

    let by_kind = memory::KINDS.iter().zip(report.at_peak);
    Ok(DryRun {
        world_size,
        rank,
        mesh: world.mesh().to_string(),
        num_parameters: trainer.model().num_parameters(),
        peak_bytes: report.peak,
        bytes_by_kind: by_kind
            .map(|(kind, bytes)| (kind.to_string(), bytes))
            .collect(),
        collectives: totals
            .collectives
            .iter()
            .filter(|(_, total)| total.count > 0)
            .map(|(&(kind, purpose), total)| CollectiveRow {
                kind,
                purpose,
                count: total.count,
                payload_bytes: total.payload_bytes,
                sent_bytes: total.sent_bytes,
            })
            .collect(),
        flops: operators.iter().map(|operator| operator.flops).sum(),
        num_operators: operators.len(),
    })
}

/// A micro-batch of the right shape and nothing in it.
fn meta_batch(config: &Config, rows: usize) -> Result<Batch> {
    let empty = |shape: &[usize], kind| Place::Meta.empty(shape, kind);
    Ok(match config.model.resolve()? {
        ModelSpec::Llama(_) => {
            let shape = [rows, config.training.seq_len];
            Batch {
                inputs: empty(&shape, Kind::Int64)?,
                targets: empty(&shape, Kind::Int64)?,
                num_targets: (rows * config.training.seq_len) as i64,
            }
        }
        ModelSpec::Cnn => Batch {
            inputs: empty(
                &[rows, 1, IMAGE_SIDE, IMAGE_SIDE],
                build::kind(config.training.dtype),
            )?,
            targets: empty(&[rows], Kind::Int64)?,
            num_targets: rows as i64,
        },
    })
}

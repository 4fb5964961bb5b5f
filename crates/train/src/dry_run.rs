//! A dry run: the real code, one rank, on tensors without memory and groups that send nothing.
//!
//! What it reports is read off the same observers and the same ledger that a real run writes, so it
//! cannot drift from what runs.

use std::collections::BTreeMap;

use serde::Serialize;
use tch::Kind;
use trainyard_config::Config;
use trainyard_data::{Batch, IMAGE_SIDE};
use trainyard_mesh::Mesh;
use trainyard_nn::Place;
use trainyard_parallel::{RecomputePlan, StateBytes};
use trainyard_torch::memory::{self, MemoryReport};
use trainyard_torch::{World, operators};
use trainyard_trace::{Calls, CollectiveKind, Ledger, MemoryKind, Purpose, calls};

use crate::build;
use crate::error::Result;
use crate::memory_report::MemoryWatch;
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
    /// What this rank holds between steps, as the allocator counts it.
    pub states: StateBytes,
    /// The same by formula.
    pub states_by_formula: StateBytes,
    /// What is communicated in a step.
    pub collectives: Vec<CollectiveRow>,
    /// Floating-point operations of this rank in a step.
    pub flops: u64,
    /// Operators that ran in a step.
    pub num_operators: usize,
    /// The same by name and size.
    pub operators: Vec<Calls>,
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
    let batches = meta_batches(config, &trainer)?;
    // The first step brings the optimiser's state into being; the second is like all that follow.
    trainer.step(&batches)?;
    memory::reset_peak();
    let before = ledger.totals();
    let (stepped, operators) =
        operators::record(|| watched_step(config, &mut trainer, &batches, &ledger))?;
    stepped?;
    let totals = ledger.totals() - before;
    let report = memory::report()?;

    let by_kind = memory::KINDS.iter().zip(report.at_peak);
    Ok(DryRun {
        world_size,
        rank,
        mesh: world.mesh().to_string(),
        num_parameters: config.model.resolve()?.num_parameters(),
        peak_bytes: report.peak,
        bytes_by_kind: by_kind
            .map(|(kind, bytes)| (kind.to_string(), bytes))
            .collect(),
        states: states_held(&report, &trainer),
        states_by_formula: trainer.model().states(num_moments(&trainer)),
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
        operators: calls(&operators),
    })
}

/// The step, drawn if the config wants its memory drawn.
fn watched_step(
    config: &Config,
    trainer: &mut Trainer,
    batches: &[Batch],
    ledger: &Ledger,
) -> Result<()> {
    match MemoryWatch::from_config(config, ledger.rank(), 0) {
        Some(watch) => {
            let (_, memory) = watch.watch(ledger, || trainer.step(batches))?;
            memory.write()
        }
        None => trainer.step(batches).map(drop),
    }
}

/// Parameters, gradients and the optimiser's states, without the small numbers in which optimisers
/// count their steps.
fn states_held(report: &MemoryReport, trainer: &Trainer) -> StateBytes {
    let state = trainer.optimizer().state();
    let counters = state.iter().filter(|(_, tensor)| tensor.dim() == 0);
    let of = |kind| {
        let index = memory::KINDS.iter().position(|known| *known == kind);
        index.map_or(0, |index| report.held[index])
    };
    StateBytes {
        parameters: of(MemoryKind::Parameter),
        gradients: of(MemoryKind::Gradient),
        optimizer: of(MemoryKind::Optimizer) - 4 * counters.count() as u64,
    }
}

/// States of the optimiser that are as large as a parameter.
fn num_moments(trainer: &Trainer) -> u64 {
    let kinds = trainer.optimizer().kinds();
    kinds.iter().filter(|kind| **kind != "step").count() as u64
}

/// The most bytes a rank holds in a step that recomputes as `plan` says.
pub(crate) fn peak_with(config: &Config, mesh: Mesh, plan: &RecomputePlan) -> Result<u64> {
    memory::observe();
    let held = memory::report()?.total;
    let world = World::fake(mesh, 0, Ledger::new(0))?;
    let mut trainer = Trainer::with_plan(config, &world, Place::Meta, plan)?;
    let batches = meta_batches(config, &trainer)?;
    trainer.step(&batches)?;
    memory::reset_peak();
    trainer.step(&batches)?;
    let peak = memory::report()?.peak.saturating_sub(held);
    memory::reset_peak();
    Ok(peak)
}

/// The micro-batches of a step.
fn meta_batches(config: &Config, trainer: &Trainer) -> Result<Vec<Batch>> {
    let batching = trainer.batching();
    (0..batching.num_microbatches)
        .map(|_| meta_batch(config, batching.local))
        .collect()
}

/// A micro-batch of the right shape and nothing in it.
fn meta_batch(config: &Config, rows: usize) -> Result<Batch> {
    let empty = |shape: &[usize], kind| Place::Meta.empty(shape, kind);
    Ok(match config.model.resolve()?.decoder() {
        Some(_) => {
            let shape = [rows, config.training.seq_len];
            Batch {
                inputs: empty(&shape, Kind::Int64)?,
                targets: empty(&shape, Kind::Int64)?,
                num_targets: (rows * config.training.seq_len) as i64,
                samples: Vec::new(),
            }
        }
        None => Batch {
            inputs: empty(
                &[rows, 1, IMAGE_SIDE, IMAGE_SIDE],
                build::kind(config.training.dtype),
            )?,
            targets: empty(&[rows], Kind::Int64)?,
            num_targets: rows as i64,
            samples: Vec::new(),
        },
    })
}

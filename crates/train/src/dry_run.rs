//! Dry runs: the training code of one rank, on meta tensors and with a fake process group.
//!
//! The results come from the same allocator counters and the same ledger as in a real run, so they cannot
//! diverge from the code.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tch::Kind;
use trainyard_config::Backend;
use trainyard_cost::StateBytes;
use trainyard_data::Batch;
use trainyard_nn::Device;
use trainyard_parallel::RecomputePlan;
use trainyard_torch::device::{self, DeviceMemory};
use trainyard_torch::memory::{self, MemoryReport};
use trainyard_torch::{TorchError, World, meta, operators, require_gpu};
use trainyard_trace::{Calls, CollectiveKind, Ledger, MemoryKind, Purpose, calls};

use crate::build;
use crate::error::Result;
use crate::memory_profiler::MemoryProfiler;
use crate::sample_layout::SampleLayout;
use crate::train_spec::TrainSpec;
use crate::trainer::Trainer;

/// Memory, communication and computation of one training step of one rank.
#[derive(Debug, Clone, Serialize)]
pub struct DryRun {
    /// Number of ranks.
    pub world_size: usize,
    /// The rank that was simulated.
    pub rank: usize,
    /// The device mesh.
    pub mesh: String,
    /// Number of parameters of the model, unsharded.
    pub num_parameters: u64,
    /// Peak memory of this rank during a step.
    pub peak_bytes: u64,
    /// The peak memory by kind.
    pub bytes_by_kind: BTreeMap<String, u64>,
    /// Parameters, gradients and optimizer state between steps, as the allocator counts them.
    pub states: StateBytes,
    /// The same by the closed formula.
    pub states_by_formula: StateBytes,
    /// Collectives of a step.
    pub collectives: Vec<CollectiveRow>,
    /// Floating-point operations of this rank in a step.
    pub flops: u64,
    /// Number of operator calls in a step.
    pub num_operators: usize,
    /// The operator calls by name and size.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operators: Vec<Calls>,
}

/// Collectives of one kind and purpose in a step.
#[derive(Debug, Clone, Serialize)]
pub struct CollectiveRow {
    /// The operation, such as all-reduce.
    pub kind: CollectiveKind,
    /// What is communicated, such as gradients.
    pub purpose: Purpose,
    /// Number of calls.
    pub count: u64,
    /// Total size of the tensors.
    pub payload_bytes: u64,
    /// Bytes that this rank sends.
    pub sent_bytes: u64,
}

/// Simulates one step of `rank` in a world of `world_size` ranks, on GPUs.
pub fn dry_run(spec: &TrainSpec, world_size: usize, rank: usize) -> Result<DryRun> {
    dry_run_in(&fake_world(spec, world_size, rank)?, spec)
}

/// Simulates one step of the rank of a fake world.
pub(crate) fn dry_run_in(world: &World, spec: &TrainSpec) -> Result<DryRun> {
    let batches = |trainer: &Trainer| empty_batches(spec, trainer, Device::Meta);
    dry_run_with(world, spec, batches, |trainer, batches, _| {
        trainer.step(batches).map(drop)
    })
}

/// One rank of the spec's mesh whose collectives are not sent. It simulates a GPU, unless the spec's backend is for CPUs.
pub(crate) fn fake_world(spec: &TrainSpec, world_size: usize, rank: usize) -> Result<World> {
    let world = World::fake(spec.mesh(world_size)?, rank, Ledger::new(rank))?;
    Ok(world.simulating_gpu(spec.comm.backend != Backend::Gloo))
}

/// As [`dry_run_in`], with micro-batches and a step of its own, which is given the ledger of the rank.
pub(crate) fn dry_run_with(
    world: &World,
    spec: &TrainSpec,
    batches: impl FnOnce(&Trainer) -> Result<Vec<Batch>>,
    mut step: impl FnMut(&mut Trainer, &[Batch], &Ledger) -> Result<()>,
) -> Result<DryRun> {
    memory::observe();
    meta::simulate_gpu(world.is_on_gpu());
    let ledger = world.ledger();
    let mut trainer = Trainer::new(spec, world, Device::Meta)?;
    let batches = batches(&trainer)?;
    let mut step = || step(&mut trainer, &batches, ledger);
    // The first step allocates the optimizer state; the second is like all later ones.
    step()?;
    memory::reset_peak();
    let before = ledger.totals();
    let (stepped, operators) = operators::record(|| profiled(spec, ledger, step))?;
    stepped?;
    let totals = ledger.totals() - before;
    let report = memory::report()?;

    let by_kind = memory::KINDS.iter().zip(report.at_peak);
    Ok(DryRun {
        world_size: world.size(),
        rank: world.rank(),
        mesh: world.mesh().to_string(),
        num_parameters: build::num_parameters(spec)?,
        peak_bytes: report.peak,
        bytes_by_kind: by_kind
            .map(|(kind, bytes)| (kind.to_string(), bytes))
            .collect(),
        states: allocated_states(&report, &trainer),
        states_by_formula: states_by_formula(&trainer),
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

/// Peak memory of one rank as the caching allocator of a GPU counts it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct AllocatorPeak {
    /// While the model is built, before a step: all that the allocator has taken from the device.
    pub startup_bytes: u64,
    /// Memory of tensors, in a step.
    pub allocated_bytes: u64,
    /// All that the allocator has taken from the device, in a step. It decides whether the job runs out of memory.
    pub reserved_bytes: u64,
    /// The memory of the device.
    pub capacity_bytes: u64,
}

impl AllocatorPeak {
    /// The share of the reserved memory that no tensor uses at the peak: fragmentation.
    pub fn unused(&self) -> f64 {
        1.0 - self.allocated_bytes as f64 / self.reserved_bytes.max(1) as f64
    }
}

/// Takes steps of `rank` in a world of `world_size` ranks on the first GPU of this node, without communication.
pub fn allocator_peak(spec: &TrainSpec, world_size: usize, rank: usize) -> Result<AllocatorPeak> {
    require_gpu(rank)?;
    let gpu = tch::Device::Cuda(0);
    device::set_current(gpu)?;
    let world = fake_world(spec, world_size, rank)?;
    let mut trainer = Trainer::new(spec, &world, gpu.into())?;
    let batches = empty_batches(spec, &trainer, gpu.into())?;
    let at_startup = on_gpu(gpu)?;
    device::reset_peak_memory(gpu)?;
    // The first step allocates the optimizer state; the later ones show how much the allocator reuses.
    for _ in 0..3 {
        trainer.step(&batches)?;
    }
    let found = on_gpu(gpu)?;
    Ok(AllocatorPeak {
        startup_bytes: at_startup.peak_reserved,
        allocated_bytes: found.peak_allocated,
        reserved_bytes: found.peak_reserved,
        capacity_bytes: found.capacity,
    })
}

fn on_gpu(gpu: tch::Device) -> Result<DeviceMemory> {
    let memory = device::memory(gpu)?;
    Ok(memory.ok_or_else(|| TorchError::Invalid(format!("{gpu:?} is not a GPU")))?)
}

/// Takes a step, under the memory profiler if the config enables it.
fn profiled(spec: &TrainSpec, ledger: &Ledger, step: impl FnOnce() -> Result<()>) -> Result<()> {
    match MemoryProfiler::from_config(spec, ledger.rank(), 0) {
        Some(profiler) => {
            let ((), memory) = profiler.profile(ledger, step)?;
            memory.write()
        }
        None => step(),
    }
}

/// Bytes of parameters, gradients and optimizer state, without the scalar step counters of the optimizer.
fn allocated_states(report: &MemoryReport, trainer: &Trainer) -> StateBytes {
    let state = trainer.optimizer().state();
    let counters = state.iter().filter(|(_, tensor)| tensor.dim() == 0);
    let of = |kind| {
        let index = memory::KINDS.iter().position(|known| *known == kind);
        index.map_or(0, |index| report.allocated[index])
    };
    StateBytes {
        parameters: of(MemoryKind::Parameter),
        gradients: of(MemoryKind::Gradient),
        optimizer: of(MemoryKind::Optimizer).saturating_sub(4 * counters.count() as u64),
    }
}

/// The states of the model that are in memory, and the optimizer's of each parameter.
fn states_by_formula(trainer: &Trainer) -> StateBytes {
    let states = trainer.model().states();
    if trainer.is_offloaded() {
        return states;
    }
    StateBytes {
        optimizer: states.optimizer + trainer.optimizer().moment_bytes(trainer.parameters()),
        ..states
    }
}

/// The peak memory of a step of rank 0 of a world under an activation checkpointing plan.
pub(crate) fn peak_with_plan(spec: &TrainSpec, world: &World, plan: &RecomputePlan) -> Result<u64> {
    memory::observe();
    meta::simulate_gpu(world.is_on_gpu());
    let before = memory::report()?.total;
    let world =
        World::fake(world.mesh().clone(), 0, Ledger::new(0))?.simulating_gpu(world.is_on_gpu());
    let mut trainer = Trainer::with_plan(spec, &world, Device::Meta, plan)?;
    let batches = empty_batches(spec, &trainer, Device::Meta)?;
    trainer.step(&batches)?;
    memory::reset_peak();
    trainer.step(&batches)?;
    let peak = memory::report()?.peak.saturating_sub(before);
    memory::reset_peak();
    Ok(peak)
}

/// The micro-batches of a step, uninitialized.
pub(crate) fn empty_batches(
    spec: &TrainSpec,
    trainer: &Trainer,
    device: Device,
) -> Result<Vec<Batch>> {
    let (batching, layout) = (trainer.batching(), SampleLayout::of(spec)?);
    (0..batching.num_microbatches)
        .map(|_| empty_batch(&layout, batching.local, device))
        .collect()
}

/// An uninitialized micro-batch with `rows` samples.
pub(crate) fn empty_batch(layout: &SampleLayout, rows: usize, device: Device) -> Result<Batch> {
    let empty = |(shape, kind): &(Vec<usize>, Kind)| {
        let shape: Vec<usize> = std::iter::once(rows).chain(shape.iter().copied()).collect();
        device.empty(&shape, *kind)
    };
    let num_targets = rows * layout.num_targets();
    let (inputs, targets) = (empty(&layout.inputs)?, empty(&layout.targets)?);
    Ok(Batch::new(inputs, targets, num_targets as i64))
}

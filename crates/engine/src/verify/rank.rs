//! One rank of `trainyard verify`: trains and writes the results to compare.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use trainyard_config::{ActivationCheckpointMode, GradientCompression};
use trainyard_cost::CommCounts;
use trainyard_data::{Sampler, step_batches};
use trainyard_mesh::Axis;
use trainyard_nn::weights;
use trainyard_parallel::{
    AuditedReduction, GradientBucket, GradientHook, PlainReduction, Reduction,
};
use trainyard_torch::{Group, ReduceOp, World};
use trainyard_trace::{Ledger, Purpose};
use trainyard_train::full_state_dict::full_parameters;
use trainyard_train::{TrainSpec, Trainer, build};

use crate::error::{EngineError, Result};
use crate::ranks::join;

/// The results of one rank.
#[derive(Debug, Serialize, Deserialize)]
pub struct RankReport {
    /// The pipeline stage of this rank; formulas are for all ranks of a stage.
    pub stage: usize,
    /// Mean loss over the global batch, per step.
    pub losses: Vec<f64>,
    /// Norm of the global gradient, per step.
    pub grad_norms: Vec<f64>,
    /// The largest difference of compressed gradients from exact sums, if it was measured.
    pub gradient_difference: Option<f64>,
    /// Bytes of gradients reduced, over all steps.
    pub gradient_payload: u64,
    /// Bytes of gradients that this rank sent, by the algorithms of the collectives.
    pub gradient_sent: u64,
    /// Bytes of parameters that this rank sent.
    pub parameter_sent: u64,
    /// Bytes of outer gradients that this rank sent.
    pub outer_sent: u64,
    /// Bytes of activations that the layers of this rank sent.
    pub activation_sent: u64,
    /// All bytes that this rank sent.
    pub sent: u64,
    /// Collectives that this rank took part in.
    pub num_collectives: u64,
    /// Bytes sent as counted by the kernel.
    pub wire_sent: u64,
    /// Bytes of gradients reduced in all steps, by formula.
    pub payload_formula: u64,
    /// Bytes of gradients that all ranks send in all steps, by formula.
    pub gradient_formula: u64,
    /// Bytes of parameters that all ranks send in all steps, by formula.
    pub parameter_formula: u64,
    /// Bytes of outer gradients that all ranks with the same shards send in all steps, by formula.
    pub outer_formula: u64,
    /// The number of ranks with the same shards in other replicas, this one included.
    pub num_replicas: u64,
    /// Bytes of activations that all ranks send in all steps, by formula; `None` with recomputation.
    pub activation_formula: Option<u64>,
}

/// A deliberate fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum InjectedFault {
    /// Rank 0 uses its local gradients instead of the reduced ones.
    UnreducedGradient,
}

impl fmt::Display for InjectedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unreduced-gradient")
    }
}

/// The path of the report of a rank.
pub fn report_file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank{rank}.json"))
}

/// The path of the parameters of a rank.
pub fn parameters_file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank{rank}.safetensors"))
}

/// Writes the results of a process.
pub fn write_report(path: &Path, report: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(report).unwrap_or_default();
    std::fs::write(path, text).map_err(|source| EngineError::Io {
        path: path.to_owned(),
        source,
    })
}

/// Trains for `steps` steps and writes report and parameters to `out`.
pub fn run(
    spec: &TrainSpec,
    steps: u64,
    out: &Path,
    inject_fault: Option<InjectedFault>,
) -> Result<()> {
    let world = join(spec, Ledger::new)?;
    let mut audit = None;
    let mut trainer = match inject_fault {
        None if is_audited(spec, &world) => {
            let mut options = build::ddp_options(spec);
            let hook = AuditedReduction::new(options.hook);
            audit = Some(hook.worst());
            options.hook = Box::new(hook);
            Trainer::with_options(spec, &world, world.device().into(), options)?
        }
        None => Trainer::new(spec, &world, world.device().into())?,
        Some(InjectedFault::UnreducedGradient) => {
            let mut options = build::ddp_options(spec);
            options.hook = Box::new(Unreduced);
            Trainer::with_options(spec, &world, world.device().into(), options)?
        }
    };
    let batching = *trainer.batching();
    let sampler = Sampler::new(batching.global, batching.ranks, batching.num_microbatches)?;
    let source = build::source(spec, build::Phase::Training)?;
    let group = trainer.data_group().clone();
    let world_group = world.world_group()?;

    // Start counting bytes only when all ranks have initialized.
    world_group.barrier()?.wait()?;
    let (before, wire_before) = (world.ledger().totals(), world.wire_bytes());
    let (mut losses, mut grad_norms) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let batches = step_batches(&*source, &sampler, step, group.index(), world.device())?;
        let outcome = trainer.step(&batches)?;
        losses.push(trainer.loss_over_replicas(&outcome.local_loss)?);
        grad_norms.push(f64::try_from(&outcome.grad_norm)?);
    }
    trainer.wait_pending()?;
    // After the barrier all ranks have received everything, so all sent bytes are acknowledged.
    world_group.barrier()?.wait()?;
    let totals = world.ledger().totals() - before;
    let gradients = totals.of_purpose(Purpose::Gradient);
    let volume = trainer.model().volume(
        CommCounts::per_microbatch(batching.num_microbatches),
        world.size(),
    );
    let num_tokens = batching.global * spec.training.seq_len;
    let layer_comm_bytes = trainer.model().layer_comm_bytes(num_tokens as u64);
    let runs_once = spec.activation_checkpoint.mode == ActivationCheckpointMode::None;
    let report = RankReport {
        stage: world.mesh().coordinates(world.rank())?.get(Axis::Pp),
        losses,
        grad_norms,
        gradient_difference: audit.and_then(|worst| worst.lock().ok().map(|worst| *worst)),
        gradient_payload: gradients.payload_bytes,
        gradient_sent: gradients.sent_bytes,
        parameter_sent: totals.of_purpose(Purpose::Parameter).sent_bytes,
        outer_sent: totals.of_purpose(Purpose::OuterGradient).sent_bytes,
        activation_sent: totals.of_purpose(Purpose::Activation).sent_bytes,
        sent: totals.all_collectives().sent_bytes,
        num_collectives: totals.all_collectives().count,
        wire_sent: world.wire_bytes().sent - wire_before.sent,
        payload_formula: steps * volume.reduced,
        gradient_formula: steps * volume.gradients,
        parameter_formula: steps * volume.parameters,
        outer_formula: trainer.outer_volume(steps).gradients,
        num_replicas: trainer.outer_group().map_or(1, Group::size) as u64,
        activation_formula: layer_comm_bytes
            .filter(|_| runs_once)
            .map(|bytes| steps * bytes),
    };
    write_report(&report_file(out, world.rank()), &report)?;
    let parameters = full_parameters(&trainer, &world)?;
    weights::save(parameters_file(out, world.rank()), &parameters)?;
    // Rank 0 may host the TCPStore: no rank exits before all are done.
    world_group.barrier()?.wait()?;
    Ok(())
}

/// Whether compressed gradients are compared with exact sums: where one hook reduces all of them.
fn is_audited(spec: &TrainSpec, world: &World) -> bool {
    let is_plain = spec.activation_checkpoint.mode == ActivationCheckpointMode::None
        && world.mesh().size(Axis::Pp) == 1;
    let compression = spec.parallelism.gradient_compression;
    compression != GradientCompression::None && is_plain && !build::is_sharded(spec, world)
}

/// Takes part in every reduction, but discards the result on rank 0: the communicated bytes are right, the
/// gradients of rank 0 are not.
struct Unreduced;

impl GradientHook for Unreduced {
    fn reduce(
        &self,
        group: &Group,
        bucket: &GradientBucket<'_>,
        op: ReduceOp,
    ) -> trainyard_torch::Result<Box<dyn Reduction>> {
        let copy = match group.index() {
            0 => bucket.flat.f_detach_copy()?,
            _ => bucket.flat.shallow_clone(),
        };
        let bucket = GradientBucket {
            flat: &copy,
            members: Vec::new(),
            ..*bucket
        };
        PlainReduction.reduce(group, &bucket, op)
    }
}

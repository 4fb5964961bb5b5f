//! One rank of a verification: trains, and writes down everything that can be compared.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::Tensor;
use trainyard_config::{ActivationCheckpointMode, Config};
use trainyard_data::{Sampler, step_batches};
use trainyard_mesh::Axis;
use trainyard_nn::{Place, weights};
use trainyard_parallel::{GradientHook, Passes, PlainReduction, Reduction};
use trainyard_torch::{Group, ReduceOp};
use trainyard_trace::{Ledger, Purpose};
use trainyard_train::whole_state::whole_parameters;
use trainyard_train::{Trainer, build};

use crate::error::{EngineError, Result};
use crate::ranks::join;

/// What one rank found.
#[derive(Debug, Serialize, Deserialize)]
pub struct Findings {
    /// Which stage of a pipeline this rank is of: formulas are of all its ranks.
    pub stage: usize,
    /// Mean loss over the global batch, per step.
    pub losses: Vec<f64>,
    /// Norm of the global gradient, per step.
    pub grad_norms: Vec<f64>,
    /// Bytes of gradients reduced, over all steps.
    pub gradient_payload: u64,
    /// Bytes of gradients this rank sent by its algorithm.
    pub gradient_sent: u64,
    /// Bytes of parameters this rank sent by its algorithm.
    pub parameter_sent: u64,
    /// Bytes of activations this rank's layers sent by their algorithms.
    pub activation_sent: u64,
    /// Bytes of anything this rank sent by its algorithms.
    pub sent: u64,
    /// Bytes the kernel counted as sent.
    pub wire_sent: u64,
    /// Bytes of gradients reduced in all steps, by formula.
    pub payload_formula: u64,
    /// Bytes of gradients all ranks send in all steps, by formula.
    pub gradient_formula: u64,
    /// The same of parameters.
    pub parameter_formula: u64,
    /// The same of activations; unknown where layers run more than once a step.
    pub activation_formula: Option<u64>,
}

/// A deliberate mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Sabotage {
    /// The first rank keeps its own gradients.
    UnreducedGradient,
}

impl fmt::Display for Sabotage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unreduced-gradient")
    }
}

/// Where a rank's findings are.
pub fn findings_file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank{rank}.json"))
}

/// Where a rank's parameters are.
pub fn parameters_file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank{rank}.safetensors"))
}

/// Trains `steps` steps and writes findings and parameters into `out`.
pub fn run(config: &Config, steps: u64, out: &Path, sabotage: Option<Sabotage>) -> Result<()> {
    let world = join(config, Ledger::new)?;
    let mut trainer = match sabotage {
        None => Trainer::new(config, &world, Place::Cpu)?,
        Some(Sabotage::UnreducedGradient) => {
            let mut options = build::ddp_options(config);
            options.hook = Box::new(Unreduced);
            Trainer::with_options(config, &world, Place::Cpu, options)?
        }
    };
    let batching = *trainer.batching();
    let sampler = Sampler::new(batching.global, batching.ranks, batching.num_microbatches)?;
    let source = build::source(config, false)?;
    let group = trainer.data_group().clone();
    let everyone = world.everyone()?;

    // Nobody may be counting while another still starts up.
    everyone.barrier()?.wait()?;
    let (before, wire_before) = (world.ledger().totals(), world.wire_bytes());
    let (mut losses, mut grad_norms) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let mut batches = step_batches(&*source, &sampler, step, group.index())?;
        for batch in &mut batches {
            if batch.inputs.is_floating_point() {
                batch.inputs = batch.inputs.f_to_kind(build::kind(config.training.dtype))?;
            }
        }
        let outcome = trainer.step(&batches)?;
        losses.push(trainer.global_loss(&outcome.loss_part)?);
        grad_norms.push(f64::try_from(&outcome.grad_norm)?);
    }
    trainer.settle()?;
    // Whoever is here has received everything, so everything sent is acknowledged.
    everyone.barrier()?.wait()?;
    let totals = world.ledger().totals() - before;
    let gradients = totals.of_purpose(Purpose::Gradient);
    let volume = trainer
        .model()
        .volume(Passes::each(batching.num_microbatches), world.size());
    let num_tokens = batching.global * config.training.seq_len;
    let sent_by_layers = trainer.model().sent_by_layers(num_tokens as u64);
    let runs_once = config.activation_checkpoint.mode == ActivationCheckpointMode::None;
    let findings = Findings {
        stage: world.mesh().coordinates(world.rank())?.get(Axis::Pp),
        losses,
        grad_norms,
        gradient_payload: gradients.payload_bytes,
        gradient_sent: gradients.sent_bytes,
        parameter_sent: totals.of_purpose(Purpose::Parameter).sent_bytes,
        activation_sent: totals.of_purpose(Purpose::Activation).sent_bytes,
        sent: totals.all_collectives().sent_bytes,
        wire_sent: world.wire_bytes().sent - wire_before.sent,
        payload_formula: steps * volume.reduced,
        gradient_formula: steps * volume.gradients,
        parameter_formula: steps * volume.parameters,
        activation_formula: runs_once.then_some(steps * sent_by_layers),
    };
    let path = findings_file(out, world.rank());
    let text = serde_json::to_string(&findings).unwrap_or_default();
    std::fs::write(&path, text).map_err(|source| EngineError::Io { path, source })?;
    let parameters = whole_parameters(&trainer, &world)?;
    weights::save(parameters_file(out, world.rank()), &parameters)?;
    // Rank 0 serves the store: nobody leaves before all are done.
    everyone.barrier()?.wait()?;
    Ok(())
}

/// Takes part in every reduction, but on the first rank leaves the result out: the bytes are right
/// and the gradients are not.
struct Unreduced;

impl GradientHook for Unreduced {
    fn reduce(
        &self,
        group: &Group,
        bucket: &Tensor,
        op: ReduceOp,
    ) -> trainyard_torch::Result<Box<dyn Reduction>> {
        match group.index() {
            0 => PlainReduction.reduce(group, &bucket.f_detach_copy()?, op),
            _ => PlainReduction.reduce(group, bucket, op),
        }
    }
}

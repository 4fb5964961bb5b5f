//! One training step: forward, backward, gradient clipping, optimizer update.

use tch::{Kind, Tensor};
use trainyard_config::{Batching, Config, Dtype};
use trainyard_data::Batch;
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{Context, ContextParallel, Device, Documents, Parameter};
use trainyard_parallel::{
    DdpOptions, LossScale, Microbatch, ParallelError, RecomputePlan, StepDecision, StepInputs,
    Strategy, scaled,
};
use trainyard_torch::device::StepScope;
use trainyard_torch::{Group, ReduceOp, Work, World, memory};
use trainyard_trace::{Ledger, MemoryKind, Purpose, SpanKind};

use crate::build;
use crate::clip::{GradNorm, clip};
use crate::error::Result;
use crate::expert_load::{ExpertLoad, ExpertLoadTracker};
use crate::expert_traffic::{ExpertTraffic, TrafficMeter};
use crate::optimizer::{self, DeviceScalars, Optimizer};
use crate::pipeline;
use crate::recompute;
use crate::scalar::{scalar_like, scalar_zero_like};
use crate::schedule::Schedule;

/// The mesh axes that divide the batch.
pub fn data_axes() -> AxisSet {
    AxisSet::of([Axis::DpReplicate, Axis::DpShard])
}

/// The mesh axes that divide the loss, over which gradients are summed: those of the batch and of the
/// sequence.
pub fn loss_axes() -> AxisSet {
    AxisSet::of([Axis::DpReplicate, Axis::DpShard, Axis::Cp])
}

/// Trains a model on this rank: model, optimizer, learning rate schedule and step counters.
pub struct Trainer {
    model: Box<dyn Strategy>,
    parameters: Vec<Parameter>,
    optimizer: Box<dyn Optimizer>,
    schedule: Schedule,
    grad_norm: GradNorm,
    expert_load: ExpertLoadTracker,
    traffic: TrafficMeter,
    max_norm: f64,
    /// Set for float16 only.
    loss_scale: Option<LossScale>,
    data_group: Group,
    /// The ranks that process different targets.
    target_group: Group,
    /// The ranks whose losses sum up to the loss of the global batch: the target group and all pipeline
    /// stages, of which only the last has a loss.
    loss_group: Group,
    cp: ContextParallel,
    /// The end-of-document token; attention does not cross it.
    end_of_document: Option<i64>,
    ledger: Ledger,
    batching: Batching,
    /// Targets of a step if every position has one. It depends on the config only, because all ranks must
    /// divide by the same number, whatever their batches contain.
    nominal_targets: f64,
    is_dry_run: bool,
    /// Whether steps are marked for CUDA's profilers.
    cuda_profiler: bool,
    step: u64,
    samples_seen: u64,
}

/// The optimizer with the learning rate and gradient scale of one step, for the strategy to call.
struct OptimizerStep<'a> {
    optimizer: &'a mut dyn Optimizer,
    learning_rate: f64,
    scale: Option<Tensor>,
}

impl trainyard_parallel::Optimizer for OptimizerStep<'_> {
    fn step(&mut self) -> trainyard_parallel::Result<()> {
        let scalars = DeviceScalars {
            grad_scale: self.scale.as_ref(),
            found_inf: None,
        };
        self.optimizer
            .step_with(self.learning_rate, scalars)
            .map_err(|e| ParallelError::Optimizer {
                reason: e.to_string(),
            })
    }

    fn states(&self) -> Vec<(String, Tensor)> {
        self.optimizer.state()
    }
}

/// An all-reduce in flight that counts the targets of the global batch.
struct PendingCount {
    count: Tensor,
    work: Work,
}

impl PendingCount {
    fn finish(self) -> Result<f64> {
        self.work.wait()?;
        Ok(self.count.f_int64_value(&[0])? as f64)
    }
}

/// The part of a micro-batch that this rank computes: under context parallelism, some positions only.
struct LocalMicrobatch {
    inputs: Tensor,
    targets: Tensor,
    num_targets: i64,
    documents: Option<Documents>,
}

/// The results of a step, still on the device: reading a value waits for it.
#[derive(Debug)]
pub struct StepOutcome {
    /// This rank's contribution to the mean loss over the global batch. The sum over all ranks is that loss.
    pub local_loss: Tensor,
    /// Norm of the global gradient, before clipping.
    pub grad_norm: Tensor,
    /// The learning rate that was used.
    pub learning_rate: f64,
}

impl Trainer {
    /// Builds the model, strategy and optimizer of a config.
    pub fn new(config: &Config, world: &World, device: Device) -> Result<Trainer> {
        Self::with_plan(config, world, device, &recompute::plan(config, world)?)
    }

    /// As [`Trainer::new`], with a given activation checkpointing plan.
    pub fn with_plan(
        config: &Config,
        world: &World,
        device: Device,
        plan: &RecomputePlan,
    ) -> Result<Trainer> {
        let strategy = match world.mesh().size(Axis::Pp) {
            1 => {
                let model = build::model(config, world, device)?;
                build::strategy(config, model.into(), world, plan)?
            }
            _ => pipeline::pipeline(config, world, device, plan)?,
        };
        Self::with_strategy(config, world, strategy)
    }

    /// As [`Trainer::new`], with the model replicated by DDP with the given options.
    pub fn with_options(
        config: &Config,
        world: &World,
        device: Device,
        options: DdpOptions,
    ) -> Result<Trainer> {
        let model = build::model(config, world, device)?;
        let model = build::replicated(model, world, options)?;
        Self::with_strategy(config, world, Box::new(model))
    }

    /// A trainer for a model that is already wrapped in a strategy.
    pub fn with_strategy(
        config: &Config,
        world: &World,
        model: Box<dyn Strategy>,
    ) -> Result<Trainer> {
        let data_group = world.group(data_axes())?;
        let batching = config.batching(data_group.size())?;
        let parameters: Vec<Parameter> = model.parameters();
        Ok(Trainer {
            optimizer: optimizer::build(&config.optimizer, parameters.clone()),
            schedule: Schedule::from_config(config, batching.global),
            grad_norm: GradNorm::new(
                &without_tied_replicas(&parameters, &model.tied_replicas()),
                world,
            )?,
            max_norm: config.training.max_norm,
            loss_scale: (config.training.compute_dtype() == Dtype::Float16)
                .then(LossScale::default),
            nominal_targets: match config.model.resolve()?.decoder() {
                Some(_) => batching.global * config.training.seq_len,
                None => batching.global,
            } as f64,
            is_dry_run: world.is_fake(),
            cuda_profiler: config.profiling.cuda_profiler,
            expert_load: ExpertLoadTracker::new(&*model, world, config)?,
            traffic: TrafficMeter::new(world)?,
            ledger: world.ledger().clone(),
            model,
            parameters,
            data_group,
            target_group: world.group(loss_axes())?,
            loss_group: world.group(loss_axes().union(Axis::Pp.into()))?,
            cp: build::context_parallel(config, world)?,
            end_of_document: config.training.eos_token_id,
            batching,
            step: 0,
            samples_seen: 0,
        })
    }

    /// One training step over the micro-batches of this rank, with full sequences.
    pub fn step(&mut self, microbatches: &[Batch]) -> Result<StepOutcome> {
        let microbatches = &self.local_microbatches(microbatches)?;
        let ledger = self.ledger.clone();
        let _step = ledger.enter(SpanKind::Step, format!("step {}", self.step + 1));
        let _device_step = StepScope::begin(self.cuda_profiler);
        let target_count = self.start_target_count(microbatches)?;
        let nominal_targets = self.nominal_targets;
        let local_loss = memory::scope(MemoryKind::Activation, || {
            self.forward_backward(microbatches, nominal_targets)
        })?;
        // The count was all-reduced during forward and backward; correct the scale for it here.
        let correction = nominal_targets / target_count.finish()?;
        // Multiplied by this factor, the gradients are those of the mean loss.
        let factor = correction / self.scale();
        let outcome = {
            let _span = ledger.enter(SpanKind::Optimizer, "optimizer");
            let grad_norm = scaled(&self.grad_norm.norm()?, factor)?;
            let learning_rate = self.schedule.lr(self.step);
            if self.check_overflow(&grad_norm)? == StepDecision::Take {
                if self.max_norm > 0.0 {
                    clip(&self.parameters, &grad_norm, self.max_norm)?;
                }
                let scale = (factor != 1.0).then(|| scalar_like(&grad_norm, 1.0 / factor));
                self.model.optimizer_step(&mut OptimizerStep {
                    optimizer: &mut *self.optimizer,
                    learning_rate,
                    scale: scale.transpose()?,
                })?;
                self.expert_load.rebalance(&*self.model)?;
            }
            self.model.zero_grad()?;
            StepOutcome {
                local_loss: scaled(&local_loss, correction)?,
                grad_norm,
                learning_rate,
            }
        };
        self.step += 1;
        self.samples_seen += self.batching.global as u64;
        Ok(outcome)
    }

    /// The index of the first sample of a micro-batch in the global batch of the step.
    fn first_sample(&self, microbatch: usize) -> u64 {
        let before = self.data_group.index() * self.batching.num_microbatches + microbatch;
        (before * self.batching.local) as u64
    }

    /// This rank's positions of the sequences, under context parallelism.
    fn local_microbatches(&self, batches: &[Batch]) -> Result<Vec<LocalMicrobatch>> {
        let local = |batch: &Batch| -> Result<LocalMicrobatch> {
            Ok(LocalMicrobatch {
                inputs: self.cp.shard(&batch.inputs)?,
                targets: self.cp.shard(&batch.targets)?,
                num_targets: batch.num_targets / self.cp.size() as i64,
                documents: self.documents(batch)?,
            })
        };
        batches.iter().map(local).collect()
    }

    /// The document boundaries of a micro-batch, if attention is limited to documents. A dry run has no token
    /// values and assumes one document per sequence, which needs the most memory.
    fn documents(&self, batch: &Batch) -> Result<Option<Documents>> {
        let end = self.end_of_document.filter(|_| !self.is_dry_run);
        let documents = end.map(|end| Documents::from_tokens(&batch.host_inputs, end));
        Ok(documents.transpose()?)
    }

    /// The factor by which the loss is multiplied.
    fn scale(&self) -> f64 {
        self.loss_scale.as_ref().map_or(1.0, LossScale::scale)
    }

    /// Whether to take or skip the step. The host reads the norm only if the loss is scaled.
    fn check_overflow(&mut self, norm: &Tensor) -> Result<StepDecision> {
        let Some(scale) = &mut self.loss_scale else {
            return Ok(StepDecision::Take);
        };
        if self.is_dry_run {
            return Ok(StepDecision::Take);
        }
        let decision = scale.update(f64::try_from(norm)?);
        if decision == StepDecision::Skip && self.ledger.rank() == 0 {
            tracing::warn!(
                "step {} skipped: gradient overflow; reducing the loss scale to {}",
                self.step + 1,
                scale.scale()
            );
        }
        Ok(decision)
    }

    fn forward_backward(&mut self, microbatches: &[LocalMicrobatch], count: f64) -> Result<Tensor> {
        let step = StepInputs {
            microbatches: self.microbatch_inputs(
                microbatches,
                &Context::training(self.step).with_loss_weight(self.scale() / count),
            ),
            count,
            scale: self.scale(),
            ledger: &self.ledger,
        };
        self.loss_or_zero(self.model.run_step(&step)?)
    }

    fn microbatch_inputs<'a>(
        &self,
        batches: &'a [LocalMicrobatch],
        cx: &Context,
    ) -> Vec<Microbatch<'a>> {
        let numbered = batches.iter().enumerate();
        let pass = |(index, batch): (usize, &'a LocalMicrobatch)| Microbatch {
            inputs: &batch.inputs,
            targets: &batch.targets,
            cx: cx
                .clone()
                .at_sample(self.first_sample(index))
                .with_documents(batch.documents.clone()),
        };
        numbered.map(pass).collect()
    }

    /// The loss, or zero on ranks without one (all pipeline stages but the last).
    fn loss_or_zero(&self, loss: Option<Tensor>) -> Result<Tensor> {
        match (loss, self.parameters.first()) {
            (Some(loss), _) => Ok(loss),
            (None, Some(first)) => scalar_zero_like(first.tensor()),
            (None, None) => Err(crate::TrainError::NoParameters),
        }
    }

    /// Starts to count the targets of the global batch, which may differ between ranks.
    fn start_target_count(&self, batches: &[LocalMicrobatch]) -> Result<PendingCount> {
        let own: i64 = batches.iter().map(|batch| batch.num_targets).sum();
        // A dry run does not communicate: it assumes that all ranks have the same count.
        let own = if self.is_dry_run {
            own * self.target_group.size() as i64
        } else {
            own
        };
        let count = Tensor::from_slice(&[own]);
        let work = self
            .target_group
            .all_reduce(&count, ReduceOp::Sum, Purpose::Control)?;
        Ok(PendingCount { count, work })
    }

    /// The mean loss over the global batch, from the local losses of all ranks. This is a collective call.
    pub fn global_loss(&self, local_loss: &Tensor) -> Result<f64> {
        let total = local_loss.f_to_kind(Kind::Double)?.f_view(1)?;
        self.loss_group
            .all_reduce(&total, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        Ok(f64::try_from(total.f_squeeze()?)?)
    }

    /// The mean loss over validation batches, without gradients. This is a collective call.
    pub fn evaluate(&self, batches: &[Batch]) -> Result<f64> {
        let _span = self.ledger.enter(SpanKind::Evaluation, "evaluation");
        let batches = &self.local_microbatches(batches)?;
        let step = StepInputs {
            microbatches: self.microbatch_inputs(batches, &Context::evaluation(self.step)),
            count: self.start_target_count(batches)?.finish()?,
            scale: 1.0,
            ledger: &self.ledger,
        };
        let total = self.loss_or_zero(self.model.evaluate(&step)?)?;
        self.global_loss(&total)
    }

    /// The load of the experts of every layer in the last step, summed over all ranks; empty for a model
    /// without experts. This is a collective call.
    pub fn expert_loads(&self) -> Result<Vec<ExpertLoad>> {
        self.expert_load.step_loads(&*self.model)
    }

    /// Time and bandwidth of token dispatch and combine since the last call, averaged over all ranks; `None`
    /// without expert parallelism. This is a collective call.
    pub fn expert_traffic(&self) -> Result<Option<ExpertTraffic>> {
        self.traffic.read(self.step)
    }

    /// Waits for communication that the last step left in flight.
    pub fn wait_pending(&self) -> Result<()> {
        Ok(self.model.wait_pending()?)
    }

    /// Steps taken so far.
    pub fn steps_taken(&self) -> u64 {
        self.step
    }

    /// Samples that all ranks together have trained on so far.
    pub fn samples_seen(&self) -> u64 {
        self.samples_seen
    }

    /// State beside parameters, optimizer and step counters that a checkpoint saves: the loss scale.
    pub fn extra_state(&self) -> serde_json::Value {
        serde_json::json!({ "loss_scale": self.loss_scale })
    }

    /// Restores the result of [`Trainer::extra_state`]. State that this job does not have is ignored.
    pub fn load_extra_state(&mut self, extra_state: &serde_json::Value) {
        let saved = serde_json::from_value(extra_state["loss_scale"].clone());
        if let (Some(own), Ok(Some(saved))) = (&mut self.loss_scale, saved) {
            *own = saved;
        }
    }

    /// Sets the step and sample counters of a resumed job.
    pub fn resume_at(&mut self, step: u64, samples_seen: u64) {
        self.step = step;
        self.samples_seen = samples_seen;
    }

    /// How the global batch is divided into ranks and micro-batches.
    pub fn batching(&self) -> &Batching {
        &self.batching
    }

    /// The data-parallel group of this rank.
    pub fn data_group(&self) -> &Group {
        &self.data_group
    }

    /// The model, wrapped in its strategy.
    pub fn model(&self) -> &dyn Strategy {
        &*self.model
    }

    /// All parameters, in the model's order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The optimizer and its state.
    pub fn optimizer(&self) -> &dyn Optimizer {
        &*self.optimizer
    }

    /// The optimizer, to load saved state into.
    pub fn optimizer_mut(&mut self) -> &mut dyn Optimizer {
        &mut *self.optimizer
    }
}

/// Parameters without replicas of tied ones, which must count once in the gradient norm.
fn without_tied_replicas(parameters: &[Parameter], replicas: &[Parameter]) -> Vec<Parameter> {
    let is_replica = |p: &Parameter| replicas.iter().any(|replica| replica.is(p));
    parameters
        .iter()
        .filter(|p| !is_replica(p))
        .cloned()
        .collect()
}

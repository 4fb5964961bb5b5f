//! One training step: forward, backward, gradient clipping, optimizer update.

use tch::{Kind, Tensor};
use trainyard_config::{Batching, Dtype, Offload};
use trainyard_cost::Volume;
use trainyard_data::Batch;
use trainyard_mesh::{Axis, AxisSet, chunk};
use trainyard_nn::{Context, ContextParallel, Device, Documents, Parameter};
use trainyard_optim::{DeviceScalars, Optimizer};
use trainyard_parallel::{
    DdpOptions, LossScale, Microbatch, OptimizerStep, OuterLoop, ParamState, RecomputePlan,
    StepDecision, StepInputs, Strategy, cast_floating, scaled,
};
use trainyard_torch::device::StepScope;
use trainyard_torch::{Group, ReduceOp, Work, World, device, memory, scalar};
use trainyard_trace::{Ledger, MemoryKind, Purpose, SpanKind};

use crate::bit_flip::PlannedBitFlip;
use crate::build;
use crate::clip::{GradNorm, clip};
use crate::error::Result;
use crate::expert_load::{ExpertLoad, ExpertLoadTracker};
use crate::expert_traffic::{ExpertTraffic, TrafficMeter};
use crate::optimizer;
use crate::parameter_server::ServedState;
use crate::pipeline;
use crate::recompute;
use crate::registry::LrFn;
use crate::replica_digest::{Drift, ReplicaDigests};
use crate::sample_layout::SampleLayout;
use crate::schedule::Schedule;
use crate::train_spec::TrainSpec;
use crate::value_guard::{GuardState, Incident, Observation, ValueGuard, found_inf};

/// The mesh axes that divide the batch.
pub fn data_axes() -> AxisSet {
    AxisSet::of(Axis::DATA)
}

/// The ranks that take optimizer steps together: all, but for other replicas along `dp_outer`.
fn replica_group(world: &World) -> Result<Group> {
    if world.mesh().size(Axis::DpOuter) == 1 {
        return Ok(world.world_group()?);
    }
    let axes = Axis::ALL.into_iter().filter(|&axis| axis != Axis::DpOuter);
    Ok(world.group(AxisSet::of(axes))?)
}

/// The mesh axes that divide the loss of a replica, over which gradients are summed: those of its batch and of the
/// sequence.
pub fn loss_axes() -> AxisSet {
    AxisSet::of([Axis::DpReplicate, Axis::DpShard, Axis::Cp])
}

/// Trains a model on this rank: model, optimizer, learning rate schedule and step counters.
pub struct Trainer {
    model: Box<dyn Strategy>,
    parameters: Vec<Parameter>,
    optimizer: Box<dyn Optimizer>,
    /// The learning rate of a step, counted from 0.
    learning_rate: LrFn,
    grad_norm: GradNorm,
    expert_load: ExpertLoadTracker,
    traffic: TrafficMeter,
    max_norm: f64,
    /// Set for float16 only.
    loss_scale: Option<LossScale>,
    guard: ValueGuard,
    /// Whether values that are not finite are incidents.
    is_guarded: bool,
    bad_sample: Option<u64>,
    /// The rank whose loss is NaN, and the step if it is not every one, for tests.
    bad_rank: Option<(usize, Option<u64>)>,
    bit_flip: Option<PlannedBitFlip>,
    replicas: ReplicaDigests,
    /// Offloaded states are not in memory when replicas are compared.
    is_offloaded: bool,
    data_group: Group,
    /// The ranks that process different targets.
    target_group: Group,
    /// Ranks along the pipeline.
    num_stages: usize,
    /// The ranks whose losses sum up to the loss of the global batch: the target group and all pipeline
    /// stages, of which only the last has a loss.
    loss_group: Group,
    cp: ContextParallel,
    /// The end-of-document token; attention does not cross it.
    end_of_document: Option<i64>,
    /// The ranks that take optimizer steps together.
    replica_group: Group,
    /// Joins replicas that take steps of their own.
    outer: Option<OuterLoop>,
    /// All ranks.
    world_group: Group,
    ledger: Ledger,
    batching: Batching,
    /// Targets of a step if every position has one. It depends on the config only, because all ranks must
    /// divide by the same number, whatever their batches contain.
    nominal_targets: f64,
    compute_kind: Kind,
    is_dry_run: bool,
    is_gpu: bool,
    /// Whether steps are marked for CUDA's profilers.
    cuda_profiler: bool,
    step: u64,
    samples_seen: u64,
    /// The first micro-batch that this rank computes, counted from the first one of the global batch.
    first_microbatch: usize,
    /// The work of parameter servers.
    served: Option<ServedState>,
}

/// An all-reduce in flight over all ranks: it counts the targets of the global batch, and the ranks that have seen
/// values that are not finite.
struct PendingCount {
    counts: Tensor,
    work: Work,
    /// The number of ranks that count the same targets: in a pipeline, only those of the last stage count.
    num_sharers: i64,
}

impl PendingCount {
    /// The number of targets, and whether any rank has a suspect.
    fn finish(self) -> Result<(i64, bool)> {
        self.work.wait()?;
        let targets = self.counts.f_int64_value(&[0])? / self.num_sharers;
        Ok((targets, self.counts.f_int64_value(&[1])? > 0))
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
    /// The number of targets of the global batch; of this replica, if replicas take steps of their own.
    pub num_targets: i64,
    /// The learning rate that was used.
    pub learning_rate: f64,
    /// Whether a rank has seen values that are not finite, in this step or before: call [`Trainer::incidents`]. It is
    /// the same on all ranks.
    pub has_incident: bool,
}

impl Trainer {
    /// Builds the model, strategy and optimizer of a config.
    pub fn new(spec: &TrainSpec, world: &World, device: Device) -> Result<Trainer> {
        Self::with_plan(spec, world, device, &recompute::plan(spec, world)?)
    }

    /// As [`Trainer::new`], with a given activation checkpointing plan.
    pub fn with_plan(
        spec: &TrainSpec,
        world: &World,
        device: Device,
        plan: &RecomputePlan,
    ) -> Result<Trainer> {
        let strategy: Box<dyn Strategy> = match world.mesh().size(Axis::Pp) {
            1 => {
                let model = build::model(spec, world, device)?;
                build::strategy(spec, model.into(), world, plan)?
            }
            _ => pipeline::pipeline(spec, world, device, plan)?,
        };
        Self::with_strategy(spec, world, strategy)
    }

    /// As [`Trainer::new`], with the model replicated by DDP with the given options.
    pub fn with_options(
        spec: &TrainSpec,
        world: &World,
        device: Device,
        options: DdpOptions,
    ) -> Result<Trainer> {
        let model = build::model(spec, world, device)?;
        let model = build::replicated(model, world, options)?;
        Self::with_strategy(spec, world, Box::new(model))
    }

    /// A trainer for a model that is already wrapped in a strategy.
    pub fn with_strategy(
        spec: &TrainSpec,
        world: &World,
        model: Box<dyn Strategy>,
    ) -> Result<Trainer> {
        let layout = SampleLayout::of(spec)?;
        layout.check_positions(world.mesh().size(Axis::Cp))?;
        let data_group = world.group(data_axes())?;
        let batching = spec.batching(data_group.size())?;
        let parameters: Vec<Parameter> = model.parameters();
        Ok(Trainer {
            optimizer: optimizer::build(spec, parameters.clone(), world)?,
            learning_rate: learning_rate(spec, batching.global)?,
            grad_norm: GradNorm::new(
                &without_tied_replicas(&parameters, &model.tied_replicas()),
                world,
            )?,
            max_norm: spec.training.max_norm,
            loss_scale: uses_float16(spec).then(LossScale::default),
            guard: ValueGuard::new(world.world_group()?),
            is_guarded: spec.value_guard.enable,
            bad_sample: spec.debug.bad_sample,
            bad_rank: spec.debug.bad_rank.map(|rank| (rank, spec.debug.bad_step)),
            bit_flip: PlannedBitFlip::from_config(&spec.debug, world.rank()),
            replicas: ReplicaDigests::new(&parameters, world)?,
            is_offloaded: spec.parallelism.offload != Offload::None,
            replica_group: replica_group(world)?,
            outer: outer_loop(spec, &parameters, world)?,
            world_group: world.world_group()?,
            nominal_targets: (batching.global / world.mesh().size(Axis::DpOuter)
                * layout.num_targets()) as f64,
            compute_kind: build::kind(spec.training.compute_dtype()),
            is_dry_run: world.is_fake(),
            is_gpu: world.device().is_cuda(),
            cuda_profiler: spec.profiling.cuda_profiler,
            expert_load: ExpertLoadTracker::new(&*model, world, spec)?,
            traffic: TrafficMeter::new(world)?,
            ledger: world.ledger().clone(),
            model,
            parameters,
            target_group: world.group(loss_axes())?,
            num_stages: world.mesh().size(Axis::Pp),
            loss_group: world.group(loss_axes().union(Axis::Pp.into()))?,
            cp: build::context_parallel(spec, world)?,
            end_of_document: spec.training.eos_token_id,
            first_microbatch: data_group.index() * batching.num_microbatches,
            data_group,
            batching,
            step: 0,
            samples_seen: 0,
            served: None,
        })
    }

    /// One training step over the micro-batches of this rank, with full sequences.
    pub fn step(&mut self, microbatches: &[Batch]) -> Result<StepOutcome> {
        // On a GPU the step before may still be running: its values are read in the next step.
        self.read_values(usize::from(self.is_gpu))?;
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
        let (num_targets, has_incident) = target_count.finish()?;
        let has_incident = self.any_replica_has(has_incident)?;
        let correction = nominal_targets / num_targets as f64;
        let learning_rate = (self.learning_rate)(self.step);
        // Multiplied by this factor, the gradients are those of the mean loss.
        let grad_norm = self.update(correction / self.scale(), learning_rate)?;
        let outcome = StepOutcome {
            local_loss: scaled(&local_loss, correction)?,
            grad_norm,
            num_targets,
            learning_rate,
            has_incident,
        };
        self.finish_step(&outcome)?;
        Ok(outcome)
    }

    /// Counts a step, joins replicas if they are due, and remembers the values of the step until they can be read.
    pub(crate) fn finish_step(&mut self, outcome: &StepOutcome) -> Result<()> {
        let first = self.samples_seen;
        self.step += 1;
        // What servers had applied ahead of an earlier step says nothing of this one.
        self.served = None;
        if let Some(outer) = &mut self.outer {
            let _span = self.ledger.enter(SpanKind::Optimizer, "outer step");
            outer.after_step(self.step)?;
        }
        self.bit_flip = self.bit_flip.filter(|flip| !flip.is_past(self.step));
        self.samples_seen += self.batching.global as u64;
        if self.watches_values() {
            let (loss, norm) = (&outcome.local_loss, &outcome.grad_norm);
            self.guard
                .watch(self.step, first..self.samples_seen, loss, norm)?;
        }
        Ok(())
    }

    /// Computes the gradients of some micro-batches of a step, beginning with number `first` of its global batch. They stay
    /// in the parameters. Returns the summed loss, divided by the nominal number of targets of the step, and the number
    /// of targets.
    pub(crate) fn gradients(
        &mut self,
        batches: &[Batch],
        step: u64,
        first: u64,
    ) -> Result<(Tensor, i64)> {
        self.seek(step, self.batching.global, first as usize);
        let microbatches = &self.local_microbatches(batches)?;
        let ledger = self.ledger.clone();
        let _step = ledger.enter(SpanKind::Step, format!("step {}", self.step + 1));
        let nominal_targets = self.nominal_targets;
        let loss = memory::scope(MemoryKind::Activation, || {
            self.forward_backward(microbatches, nominal_targets)
        })?;
        Ok((
            loss,
            microbatches.iter().map(|batch| batch.num_targets).sum(),
        ))
    }

    /// Goes to a step with `global_batch` samples, of which this rank computes the micro-batches from number `first` on.
    pub(crate) fn seek(&mut self, step: u64, global_batch: usize, first: usize) {
        self.resume_at(step, step * global_batch as u64);
        self.first_microbatch = first;
    }

    /// Reads the values of past steps; whether any of them are not finite.
    pub(crate) fn has_suspects(&mut self) -> Result<bool> {
        self.read_values(usize::from(self.is_gpu))?;
        Ok(self.guard.has_suspects())
    }

    /// The learning rate of the next step.
    pub(crate) fn next_learning_rate(&self) -> f64 {
        (self.learning_rate)(self.step)
    }

    /// Targets of a step if every position has one.
    pub(crate) fn nominal_targets(&self) -> f64 {
        self.nominal_targets
    }

    /// The work of parameter servers, if this trainer serves or a checkpoint of one was loaded.
    pub(crate) fn served(&mut self) -> &mut Option<ServedState> {
        &mut self.served
    }

    /// Clips the gradients, which are to be multiplied by `factor`, updates the parameters if they are finite, and clears
    /// the gradients. Returns their norm.
    pub(crate) fn update(&mut self, factor: f64, learning_rate: f64) -> Result<Tensor> {
        let ledger = self.ledger.clone();
        let _span = ledger.enter(SpanKind::Optimizer, "optimizer");
        if let Some(flip) = self.bit_flip {
            flip.before_update(self.step + 1, &self.parameters)?;
        }
        if let Some(outer) = &self.outer {
            outer.reduce_gradients(&self.parameters, self.step)?;
        }
        let grad_norm = scaled(&self.grad_norm.norm()?, factor)?;
        let found_inf = self.watches_values().then(|| found_inf(&grad_norm));
        let found_inf = found_inf.transpose()?;
        if self.max_norm > 0.0 {
            clip(&self.parameters, &grad_norm, self.max_norm)?;
        }
        let scale = (factor != 1.0).then(|| scalar::like(&grad_norm, 1.0 / factor));
        let scale = scale.transpose()?;
        self.model.optimizer_step(&mut OptimizerStep {
            optimizer: &mut *self.optimizer,
            lr: learning_rate,
            scalars: DeviceScalars {
                grad_scale: scale.as_ref(),
                found_inf: found_inf.as_ref(),
            },
        })?;
        self.expert_load
            .rebalance(&*self.model, found_inf.as_ref())?;
        self.model.zero_grad()?;
        if let Some(flip) = self.bit_flip {
            let states = self.optimizer.state();
            flip.after_update(self.step + 1, &self.parameters, &states)?;
        }
        Ok(grad_norm)
    }

    /// Whether any replica has an incident. Replicas that take steps of their own tell each other only when they are joined.
    fn any_replica_has(&self, has_incident: bool) -> Result<bool> {
        let Some(outer) = self.outer.as_ref().filter(|outer| outer.group().size() > 1) else {
            return Ok(has_incident);
        };
        if !outer.is_joined_after(self.step + 1) {
            return Ok(false);
        }
        let flag = Tensor::from_slice(&[i64::from(has_incident)]);
        self.world_group
            .all_reduce(&flag, ReduceOp::Max, Purpose::Control)?
            .wait()?;
        Ok(flag.f_int64_value(&[0])? > 0)
    }

    /// Whether values that are not finite are incidents.
    pub fn is_guarded(&self) -> bool {
        self.is_guarded
    }

    /// Whether optimizer states are offloaded.
    pub(crate) fn is_offloaded(&self) -> bool {
        self.is_offloaded
    }

    /// Turns the value guard on or off for the steps that follow.
    pub(crate) fn set_guarded(&mut self, is_guarded: bool) {
        self.is_guarded = is_guarded;
    }

    /// Whether the values of steps are looked at: to guard them, or to scale the loss.
    fn watches_values(&self) -> bool {
        let has_values = !self.is_dry_run && device::computes_values();
        has_values && (self.is_guarded || self.loss_scale.is_some())
    }

    /// Reads the values of past steps but those of the last `num_unread`: adapts the loss scale, and remembers those
    /// that are not finite.
    fn read_values(&mut self, num_unread: usize) -> Result<()> {
        for observation in self.guard.read_all_but(num_unread)? {
            let is_overflow = self.update_loss_scale(&observation);
            let is_finite = observation.local_loss.is_finite() && observation.grad_norm.is_finite();
            if self.is_guarded && !is_finite && !is_overflow {
                self.guard.suspect(observation);
            }
        }
        Ok(())
    }

    /// Adapts the loss scale to a step. Whether its values are not finite only because the scale was too large.
    fn update_loss_scale(&mut self, observation: &Observation) -> bool {
        let Some(scale) = &mut self.loss_scale else {
            return false;
        };
        let could_shrink = scale.scale() > 1.0;
        let is_skipped = scale.update(observation.grad_norm) == StepDecision::Skip;
        if is_skipped && self.ledger.rank() == 0 {
            tracing::warn!(
                "step {} skipped: gradient overflow; reducing the loss scale to {}",
                observation.step,
                scale.scale()
            );
        }
        is_skipped && could_shrink && observation.local_loss.is_finite()
    }

    /// The steps with values that are not finite which all ranks have agreed on since the last call. Waits for the
    /// device. This is a collective call.
    pub fn incidents(&mut self) -> Result<Vec<Incident>> {
        self.read_values(0)?;
        self.guard.agree()
    }

    /// Compares parameters and optimizer states with their replicas on other ranks. Waits for the device. This is a
    /// collective call.
    pub fn compare_replicas(&self) -> Result<Option<Drift>> {
        if self.is_dry_run || self.is_offloaded || !device::computes_values() {
            return Ok(None);
        }
        self.wait_pending()?;
        self.replicas.compare(&self.optimizer.state())
    }

    /// How often values were not finite, and which samples are left out.
    pub fn guard_state(&mut self) -> &mut GuardState {
        &mut self.guard.state
    }

    /// Which shares of a step's batch have a loss that is not finite, if this replica computes `share` of the batch that
    /// begins at sample `first`: without gradients, and without a change. This is a collective call, and the result is
    /// the same on all ranks.
    pub(crate) fn rerun(&self, batches: &[Batch], first: u64, share: usize) -> Result<Vec<bool>> {
        let batches = &self.local_microbatches(batches)?;
        let count = if self.is_bad(first, share, None) {
            f64::NAN
        } else {
            self.nominal_targets
        };
        let step = StepInputs {
            microbatches: self.microbatch_inputs(batches, &Context::evaluation(self.step)),
            count,
            scale: 1.0,
            is_guarded: false,
            ledger: &self.ledger,
        };
        let loss = self.loss_or_zero(self.model.evaluate(&step)?)?;
        let mut is_bad = vec![0i64; self.data_group.size()];
        is_bad[share] = i64::from(!f64::try_from(loss)?.is_finite());
        let is_bad = Tensor::from_slice(&is_bad);
        let work = self
            .world_group
            .all_reduce(&is_bad, ReduceOp::Max, Purpose::Control)?;
        work.wait()?;
        let is_bad = Vec::<i64>::try_from(&is_bad)?;
        Ok(is_bad.into_iter().map(|bad| bad > 0).collect())
    }

    /// The index of the first sample of a micro-batch in the global batch of the step.
    fn first_sample(&self, microbatch: usize) -> u64 {
        ((self.first_microbatch + microbatch) * self.batching.local) as u64
    }

    /// Whether the loss of this rank is NaN for tests: in its share of the batch that begins at sample `first` is a bad
    /// sample, or the rank itself is bad in this step; a step that is computed again is none of them.
    fn is_bad(&self, first: u64, share: usize, step: Option<u64>) -> bool {
        let num = self.batching.num_microbatches * self.batching.local;
        let first = first + (share * num) as u64;
        let own = first..first + num as u64;
        let has_bad_sample = self.bad_sample.is_some_and(|sample| own.contains(&sample));
        let is_bad_rank = self.bad_rank.is_some_and(|(rank, bad_step)| {
            rank == self.world_group.index() && (bad_step.is_none() || bad_step == step)
        });
        has_bad_sample || is_bad_rank
    }

    /// This rank's share of targets that context-parallel ranks have together.
    fn share_of(&self, num_targets: i64) -> i64 {
        let share = chunk(num_targets as usize, self.cp.size(), self.cp.index());
        share.len() as i64
    }

    /// This rank's positions of the sequences, under context parallelism.
    fn local_microbatches(&self, batches: &[Batch]) -> Result<Vec<LocalMicrobatch>> {
        let local = |batch: &Batch| -> Result<LocalMicrobatch> {
            Ok(LocalMicrobatch {
                inputs: self
                    .cp
                    .shard(&cast_floating(&batch.inputs, self.compute_kind)?)?,
                targets: self.cp.shard(&batch.targets)?,
                num_targets: self.share_of(batch.num_targets),
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

    fn forward_backward(&mut self, microbatches: &[LocalMicrobatch], count: f64) -> Result<Tensor> {
        let step = Some(self.step + 1);
        let count = if self.is_bad(self.samples_seen, self.data_group.index(), step) {
            f64::NAN
        } else {
            count
        };
        let step = StepInputs {
            microbatches: self.microbatch_inputs(
                microbatches,
                &Context::training(self.step).with_loss_weight(self.scale() / count),
            ),
            count,
            scale: self.scale(),
            is_guarded: self.watches_values(),
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
                .with_targets(&batch.targets)
                .with_documents(batch.documents.clone()),
        };
        numbered.map(pass).collect()
    }

    /// The loss, or zero on ranks without one (all pipeline stages but the last).
    fn loss_or_zero(&self, loss: Option<Tensor>) -> Result<Tensor> {
        match (loss, self.parameters.first()) {
            (Some(loss), _) => Ok(loss),
            (None, Some(first)) => Ok(scalar::zero_like(first.tensor())?),
            (None, None) => Err(crate::TrainError::NoParameters),
        }
    }

    /// Starts to count the targets of the global batch, which may differ between ranks.
    fn start_target_count(&self, batches: &[LocalMicrobatch]) -> Result<PendingCount> {
        let own: i64 = batches.iter().map(|batch| batch.num_targets).sum();
        let num_counting = (self.replica_group.size() / self.num_stages) as i64;
        let own = match self.model.reads_targets() {
            // A dry run does not communicate: it assumes that all ranks have the same count.
            _ if self.is_dry_run => own * num_counting,
            true => own,
            false => 0,
        };
        let counts = Tensor::from_slice(&[own, i64::from(self.guard.has_suspects())]);
        let work = self
            .replica_group
            .all_reduce(&counts, ReduceOp::Sum, Purpose::Control)?;
        Ok(PendingCount {
            counts,
            work,
            num_sharers: num_counting / self.target_group.size() as i64,
        })
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
            count: self.start_target_count(batches)?.finish()?.0 as f64,
            scale: 1.0,
            is_guarded: false,
            ledger: &self.ledger,
        };
        let total = self.loss_or_zero(self.model.evaluate(&step)?)?;
        self.loss_over_replicas(&total)
    }

    /// As [`Trainer::global_loss`], over replicas that take steps of their own too: they have as many samples each. This is
    /// a collective call.
    pub fn loss_over_replicas(&self, local_loss: &Tensor) -> Result<f64> {
        let own = self.global_loss(local_loss)?;
        let Some(group) = self.outer_group() else {
            return Ok(own);
        };
        let mean = Tensor::from_slice(&[own]);
        group
            .all_reduce(&mean, ReduceOp::Mean, Purpose::Control)?
            .wait()?;
        Ok(mean.f_double_value(&[0])?)
    }

    /// What the strategy and the outer loop remember of parameters from one step to the next, for checkpoints.
    pub fn param_states(&self) -> Result<Vec<ParamState>> {
        let mut states = self.model.param_states()?;
        if let Some(outer) = &self.outer {
            states.extend(outer.param_states());
        }
        Ok(states)
    }

    /// The ranks whose parameters and optimizer states differ from those of this rank until they are joined.
    pub fn outer_group(&self) -> Option<&Group> {
        let group = self.outer.as_ref().map(OuterLoop::group);
        group.filter(|group| group.size() > 1)
    }

    /// Starts the outer loop with the parameters as they are, if they have been loaded.
    pub(crate) fn restart_outer_loop(&mut self) -> Result<()> {
        match &mut self.outer {
            Some(outer) => Ok(outer.restart()?),
            None => Ok(()),
        }
    }

    /// Bytes that the ranks with the same shards as this one send to join replicas in the first `steps` steps.
    pub fn outer_volume(&self, steps: u64) -> Volume {
        let volume = self.outer.as_ref().map(|outer| outer.volume(steps));
        volume.unwrap_or_default()
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

    /// State beside parameters, optimizer and step counters that a checkpoint saves: the loss scale, and what the value
    /// guard has seen. With a loss scale, waits for the device.
    pub fn extra_state(&mut self) -> Result<serde_json::Value> {
        if self.loss_scale.is_some() {
            self.read_values(0)?;
        }
        Ok(serde_json::json!({
            "loss_scale": self.loss_scale,
            "value_guard": self.guard.state,
            "parameter_server": self.served,
        }))
    }

    /// Restores the result of [`Trainer::extra_state`]. State that this job does not have is ignored.
    pub fn load_extra_state(&mut self, extra_state: &serde_json::Value) {
        let saved = serde_json::from_value(extra_state["loss_scale"].clone());
        if let (Some(own), Ok(Some(saved))) = (&mut self.loss_scale, saved) {
            *own = saved;
        }
        if let Ok(state) = serde_json::from_value(extra_state["value_guard"].clone()) {
            self.guard.state = state;
        }
        self.served = serde_json::from_value(extra_state["parameter_server"].clone()).ok();
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

    /// Whether this rank computes with the values of samples. Inner stages of a pipeline need their shapes only, unless
    /// attention is limited to documents.
    pub fn reads_samples(&self) -> bool {
        let model = &self.model;
        model.reads_inputs() || model.reads_targets() || self.end_of_document.is_some()
    }

    /// The model and the optimizer, to load saved state into.
    pub fn model_and_optimizer(&mut self) -> (&dyn Strategy, &mut dyn Optimizer) {
        (&*self.model, &mut *self.optimizer)
    }
}

/// The outer loop, if the config asks for one.
fn outer_loop(
    spec: &TrainSpec,
    parameters: &[Parameter],
    world: &World,
) -> Result<Option<OuterLoop>> {
    let Some(options) = build::outer_options(spec) else {
        return Ok(None);
    };
    let group = world.group(Axis::DpOuter)?;
    Ok(Some(OuterLoop::new(parameters, &group, &options)?))
}

/// Whether layers compute, or gradients are reduced, in float16, in which small gradients become zero unless they are scaled.
fn uses_float16(spec: &TrainSpec) -> bool {
    [spec.training.compute_dtype(), spec.reduce_dtype()].contains(&Dtype::Float16)
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

/// The learning rate of every step: by a registered schedule, or by warm-up and decay.
fn learning_rate(spec: &TrainSpec, global_batch: usize) -> Result<LrFn> {
    let schedule = Schedule::from_config(spec, global_batch);
    let peak_lr = schedule.peak_lr;
    Ok(match spec.registry().lr_factor(spec)? {
        Some(factor) => Box::new(move |step| peak_lr * factor(step)),
        None => Box::new(move |step| schedule.lr(step)),
    })
}

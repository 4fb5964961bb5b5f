//! One optimiser step: forward, backward, clip, update.

use tch::{Kind, Tensor};
use trainyard_config::{Batching, Config, Dtype};
use trainyard_data::Batch;
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{Context, ContextParallel, Documents, Parameter, Place};
use trainyard_parallel::{
    DdpOptions, LossScale, ParallelError, Pass, RecomputePlan, Step, Strategy, Update, Verdict,
    scaled,
};
use trainyard_torch::{Group, ReduceOp, Work, World, memory};
use trainyard_trace::{Ledger, MemoryKind, Purpose, SpanKind};

use crate::build;
use crate::clip::{GradNorm, clip};
use crate::error::Result;
use crate::expert_traffic::{ExpertTraffic, TrafficMeter};
use crate::loads::{ExpertLoad, Loads};
use crate::optimizer::{self, Optimizer};
use crate::pipeline;
use crate::recompute;
use crate::schedule::Schedule;
use crate::zero::zero_at;

/// The axes over which the batch is divided.
pub fn data_axes() -> AxisSet {
    AxisSet::of([Axis::DpReplicate, Axis::DpShard])
}

/// The axes over which the loss is divided, and so gradients are added up: those of the batch, and
/// that of the sequence.
pub fn loss_axes() -> AxisSet {
    AxisSet::of([Axis::DpReplicate, Axis::DpShard, Axis::Cp])
}

/// A model under training on this rank.
pub struct Trainer {
    model: Box<dyn Strategy>,
    parameters: Vec<Parameter>,
    optimizer: Box<dyn Optimizer>,
    schedule: Schedule,
    grad_norm: GradNorm,
    loads: Loads,
    traffic: TrafficMeter,
    max_norm: f64,
    /// With float16 only.
    loss_scale: Option<LossScale>,
    data_group: Group,
    /// The ranks that see different targets.
    target_group: Group,
    /// The ranks whose losses add up to that of the global batch: those, and the stages of a pipeline,
    /// of which only the last has a loss.
    loss_group: Group,
    cp: ContextParallel,
    /// The token after which attention sees nothing of what came before.
    end_of_document: Option<i64>,
    ledger: Ledger,
    batching: Batching,
    /// Targets of a step when every place holds one. From the config alone, because all ranks must
    /// divide by the same number, whatever batches they are given.
    nominal: f64,
    is_dry_run: bool,
    step: u64,
    samples_seen: u64,
}

/// The optimiser in one step, as the strategy calls it.
struct Stepping<'a> {
    optimizer: &'a mut dyn Optimizer,
    learning_rate: f64,
    scale: Option<Tensor>,
}

impl Update for Stepping<'_> {
    fn step(&mut self) -> trainyard_parallel::Result<()> {
        self.optimizer
            .step(self.learning_rate, self.scale.as_ref())
            .map_err(|e| ParallelError::Update {
                reason: e.to_string(),
            })
    }

    fn states(&self) -> Vec<(String, Tensor)> {
        self.optimizer.state()
    }
}

/// The global number of targets on its way.
struct Counting {
    count: Tensor,
    work: Work,
}

impl Counting {
    fn finish(self) -> Result<f64> {
        self.work.wait()?;
        Ok(self.count.f_int64_value(&[0])? as f64)
    }
}

/// What this rank computes of a micro-batch.
struct Own {
    inputs: Tensor,
    targets: Tensor,
    num_targets: i64,
    documents: Option<Documents>,
}

/// What a step found, still on the device: reading a number waits for it.
#[derive(Debug)]
pub struct StepOutcome {
    /// This rank's part of the mean loss over the global batch; the parts of all ranks add up to it.
    pub loss_part: Tensor,
    /// Norm of the global gradient, before clipping.
    pub grad_norm: Tensor,
    /// The learning rate that was used.
    pub learning_rate: f64,
}

impl Trainer {
    /// Builds model, strategy and optimiser as the config says.
    pub fn new(config: &Config, world: &World, place: Place) -> Result<Trainer> {
        Self::with_plan(config, world, place, &recompute::plan(config, world)?)
    }

    /// The same with another choice of what to recompute.
    pub fn with_plan(
        config: &Config,
        world: &World,
        place: Place,
        plan: &RecomputePlan,
    ) -> Result<Trainer> {
        let strategy = match world.mesh().size(Axis::Pp) {
            1 => {
                let model = build::model(config, world, place)?;
                build::strategy(config, model.into(), world, plan)?
            }
            _ => pipeline::pipeline(config, world, place, plan)?,
        };
        Self::with_strategy(config, world, strategy)
    }

    /// The same, replicated, with another way of reducing gradients.
    pub fn with_options(
        config: &Config,
        world: &World,
        place: Place,
        options: DdpOptions,
    ) -> Result<Trainer> {
        let model = build::model(config, world, place)?;
        let model = build::replicated(model, world, options)?;
        Self::with_strategy(config, world, Box::new(model))
    }

    /// The same with a model that is wrapped already.
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
            grad_norm: GradNorm::new(&originals(&parameters, &model.copies()), world)?,
            max_norm: config.training.max_norm,
            loss_scale: (config.training.compute_dtype() == Dtype::Float16)
                .then(LossScale::default),
            nominal: match config.model.resolve()?.decoder() {
                Some(_) => batching.global * config.training.seq_len,
                None => batching.global,
            } as f64,
            is_dry_run: world.is_fake(),
            loads: Loads::new(&*model, world, config)?,
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

    /// One step over this rank's microbatches, whose sequences are whole.
    pub fn step(&mut self, microbatches: &[Batch]) -> Result<StepOutcome> {
        let microbatches = &self.own_positions(microbatches)?;
        let ledger = self.ledger.clone();
        let _step = ledger.enter(SpanKind::Step, format!("step {}", self.step + 1));
        let counting = self.start_counting(microbatches)?;
        let nominal = self.nominal;
        let loss_part = memory::scope(MemoryKind::Activation, || {
            self.forward_backward(microbatches, nominal)
        })?;
        // Counts that differ between ranks are set right here, where nobody waits for them any more.
        let correction = nominal / counting.finish()?;
        // What gradients must be multiplied by to be those of the mean loss.
        let factor = correction / self.scale();
        let outcome = {
            let _span = ledger.enter(SpanKind::Optimizer, "optimizer");
            let grad_norm = scaled(&self.grad_norm.norm()?, factor)?;
            let learning_rate = self.schedule.lr(self.step);
            if self.judge(&grad_norm)? == Verdict::Take {
                if self.max_norm > 0.0 {
                    clip(&self.parameters, &grad_norm, self.max_norm)?;
                }
                let scale = (factor != 1.0).then(|| Tensor::from(1.0 / factor));
                self.model.update(&mut Stepping {
                    optimizer: &mut *self.optimizer,
                    learning_rate,
                    scale,
                })?;
                self.loads.rebalance(&*self.model)?;
            }
            self.model.zero_grad()?;
            StepOutcome {
                loss_part: scaled(&loss_part, correction)?,
                grad_norm,
                learning_rate,
            }
        };
        self.step += 1;
        self.samples_seen += self.batching.global as u64;
        Ok(outcome)
    }

    /// Which sample of the step's global batch a micro-batch begins with.
    fn first_sample(&self, microbatch: usize) -> u64 {
        let before = self.data_group.index() * self.batching.num_microbatches + microbatch;
        (before * self.batching.local) as u64
    }

    /// What this rank has of sequences that several share.
    fn own_positions(&self, batches: &[Batch]) -> Result<Vec<Own>> {
        let part = |batch: &Batch| -> Result<Own> {
            Ok(Own {
                inputs: self.cp.part(&batch.inputs)?,
                targets: self.cp.part(&batch.targets)?,
                num_targets: batch.num_targets / self.cp.size() as i64,
                documents: self.documents(batch)?,
            })
        };
        batches.iter().map(part).collect()
    }

    /// The documents of a micro-batch, where they are kept apart. A dry run knows no tokens, and takes
    /// every sequence for one document, which needs the most.
    fn documents(&self, batch: &Batch) -> Result<Option<Documents>> {
        let end = self.end_of_document.filter(|_| !self.is_dry_run);
        let documents = end.map(|end| Documents::of(&batch.inputs, end));
        Ok(documents.transpose()?)
    }

    /// What the loss is multiplied by.
    fn scale(&self) -> f64 {
        self.loss_scale.as_ref().map_or(1.0, LossScale::scale)
    }

    /// Whether the step may be taken. The host reads the norm only where losses are scaled.
    fn judge(&mut self, norm: &Tensor) -> Result<Verdict> {
        let Some(scale) = &mut self.loss_scale else {
            return Ok(Verdict::Take);
        };
        if self.is_dry_run {
            return Ok(Verdict::Take);
        }
        let verdict = scale.judge(f64::try_from(norm)?);
        if verdict == Verdict::Skip && self.ledger.rank() == 0 {
            tracing::warn!(
                "step {} skipped: a gradient overflowed; loss scale is now {}",
                self.step + 1,
                scale.scale()
            );
        }
        Ok(verdict)
    }

    fn forward_backward(&mut self, microbatches: &[Own], count: f64) -> Result<Tensor> {
        let step = Step {
            passes: self.passes(
                microbatches,
                &Context::training(self.step).with_loss_weight(self.scale() / count),
            ),
            count,
            scale: self.scale(),
            ledger: &self.ledger,
        };
        self.or_nothing(self.model.run_step(&step)?)
    }

    fn passes<'a>(&self, batches: &'a [Own], cx: &Context) -> Vec<Pass<'a>> {
        let numbered = batches.iter().enumerate();
        let pass = |(index, batch): (usize, &'a Own)| Pass {
            inputs: &batch.inputs,
            targets: &batch.targets,
            cx: cx
                .clone()
                .at_sample(self.first_sample(index))
                .with_documents(batch.documents.clone()),
        };
        numbered.map(pass).collect()
    }

    /// A loss, or zero where other ranks have it.
    fn or_nothing(&self, loss: Option<Tensor>) -> Result<Tensor> {
        match (loss, self.parameters.first()) {
            (Some(loss), _) => Ok(loss),
            (None, Some(first)) => zero_at(first.tensor()),
            (None, None) => Err(crate::TrainError::NoParameters),
        }
    }

    /// Targets in the global batch: each rank's own count, summed, so that ranks may differ.
    fn start_counting(&self, batches: &[Own]) -> Result<Counting> {
        let own: i64 = batches.iter().map(|batch| batch.num_targets).sum();
        // Where nothing is sent, every rank is taken to be like this one.
        let own = if self.is_dry_run {
            own * self.target_group.size() as i64
        } else {
            own
        };
        let count = Tensor::from_slice(&[own]);
        let work = self
            .target_group
            .all_reduce(&count, ReduceOp::Sum, Purpose::Control)?;
        Ok(Counting { count, work })
    }

    /// The mean loss over the global batch, from every rank's part.
    pub fn global_loss(&self, loss_part: &Tensor) -> Result<f64> {
        let total = loss_part.f_to_kind(Kind::Double)?.f_view(1)?;
        self.loss_group
            .all_reduce(&total, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        Ok(f64::try_from(total.f_squeeze()?)?)
    }

    /// The mean loss over batches that are only looked at.
    pub fn evaluate(&self, batches: &[Batch]) -> Result<f64> {
        let _span = self.ledger.enter(SpanKind::Evaluation, "evaluation");
        let batches = &self.own_positions(batches)?;
        let step = Step {
            passes: self.passes(batches, &Context::evaluation(self.step)),
            count: self.start_counting(batches)?.finish()?,
            scale: 1.0,
            ledger: &self.ledger,
        };
        let total = self.or_nothing(self.model.evaluate(&step)?)?;
        self.global_loss(&total)
    }

    /// How many tokens the experts of every layer got in the last step, over all ranks, all of which must
    /// ask; none where there are no experts.
    pub fn expert_loads(&self) -> Result<Vec<ExpertLoad>> {
        self.loads.of_step(&*self.model)
    }

    /// How long rows were on their way to experts and back since the last time this was asked, over all
    /// ranks, all of which must ask; none where experts are not on different ranks.
    pub fn expert_traffic(&self) -> Result<Option<ExpertTraffic>> {
        self.traffic.read(self.step)
    }

    /// Waits for what the last step has left under way for the next one.
    pub fn settle(&self) -> Result<()> {
        Ok(self.model.settle()?)
    }

    /// Steps taken so far.
    pub fn steps_taken(&self) -> u64 {
        self.step
    }

    /// Samples all ranks have seen so far.
    pub fn samples_seen(&self) -> u64 {
        self.samples_seen
    }

    /// What has a pace of its own beside the steps, to be saved.
    pub fn paces(&self) -> serde_json::Value {
        serde_json::json!({ "loss_scale": self.loss_scale })
    }

    /// Takes up what [`Trainer::paces`] told, as far as this job has it.
    pub fn resume_paces(&mut self, paces: &serde_json::Value) {
        let saved = serde_json::from_value(paces["loss_scale"].clone());
        if let (Some(own), Ok(Some(saved))) = (&mut self.loss_scale, saved) {
            *own = saved;
        }
    }

    /// Goes on as if so many steps had been taken, with so many samples.
    pub fn resume_at(&mut self, step: u64, samples_seen: u64) {
        self.step = step;
        self.samples_seen = samples_seen;
    }

    /// How a global batch is divided.
    pub fn batching(&self) -> &Batching {
        &self.batching
    }

    /// The ranks the batch is divided over.
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

    /// The optimiser and its state.
    pub fn optimizer(&self) -> &dyn Optimizer {
        &*self.optimizer
    }

    /// The optimiser, to put a saved state into.
    pub fn optimizer_mut(&mut self) -> &mut dyn Optimizer {
        &mut *self.optimizer
    }
}

/// Parameters that are not copies of another rank's.
fn originals(parameters: &[Parameter], copies: &[Parameter]) -> Vec<Parameter> {
    let is_copy = |p: &Parameter| copies.iter().any(|copy| copy.is(p));
    parameters.iter().filter(|p| !is_copy(p)).cloned().collect()
}

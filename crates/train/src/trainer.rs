//! One optimiser step: forward, backward, clip, update.

use tch::{Kind, Tensor};
use trainyard_config::{Batching, Config, ModelSpec};
use trainyard_data::Batch;
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{Context, Model, Module, Parameter, Place};
use trainyard_parallel::{Ddp, DdpOptions, Sync};
use trainyard_torch::{Group, ReduceOp, Work, World, memory};
use trainyard_trace::{Ledger, MemoryKind, Purpose, SpanKind};

use crate::build;
use crate::clip::{clip, grad_norm};
use crate::error::Result;
use crate::optimizer::{self, Optimizer};
use crate::schedule::Schedule;

/// The axes over which the batch is divided.
pub fn data_axes() -> AxisSet {
    AxisSet::of([Axis::DpReplicate, Axis::DpShard])
}

/// A model under training on this rank.
pub struct Trainer {
    model: Ddp<Box<dyn Model>>,
    parameters: Vec<Parameter>,
    optimizer: Box<dyn Optimizer>,
    schedule: Schedule,
    max_norm: f64,
    data_group: Group,
    ledger: Ledger,
    batching: Batching,
    /// Targets of a step when every place holds one. From the config alone, because all ranks must
    /// divide by the same number, whatever batches they are given.
    nominal: f64,
    is_dry_run: bool,
    step: u64,
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
        Self::with_options(config, world, place, build::ddp_options(config))
    }

    /// The same with another way of reducing gradients.
    pub fn with_options(
        config: &Config,
        world: &World,
        place: Place,
        options: DdpOptions,
    ) -> Result<Trainer> {
        let data_group = world.group(data_axes())?;
        let batching = config.batching(data_group.size())?;
        let model = Ddp::new(build::model(config, place)?, &data_group, options)?;
        let parameters: Vec<Parameter> = model.parameters();
        Ok(Trainer {
            optimizer: optimizer::build(&config.optimizer, parameters.clone()),
            schedule: Schedule::from_config(config, batching.global),
            max_norm: config.training.max_norm,
            nominal: match config.model.resolve()? {
                ModelSpec::Llama(_) => batching.global * config.training.seq_len,
                ModelSpec::Cnn => batching.global,
            } as f64,
            is_dry_run: world.is_fake(),
            ledger: world.ledger().clone(),
            model,
            parameters,
            data_group,
            batching,
            step: 0,
        })
    }

    /// One step over this rank's microbatches.
    pub fn step(&mut self, microbatches: &[Batch]) -> Result<StepOutcome> {
        let ledger = self.ledger.clone();
        let _step = ledger.enter(SpanKind::Step, format!("step {}", self.step + 1));
        let counting = self.start_counting(microbatches)?;
        let nominal = self.nominal;
        let loss_part = memory::scope(MemoryKind::Activation, || {
            self.forward_backward(microbatches, nominal)
        })?;
        // Counts that differ between ranks are set right here, where nobody waits for them any more.
        let correction = nominal / counting.finish()?;
        let outcome = {
            let _span = ledger.enter(SpanKind::Optimizer, "optimizer");
            let grad_norm = scaled(grad_norm(&self.parameters)?, correction)?;
            if self.max_norm > 0.0 {
                clip(&self.parameters, &grad_norm, self.max_norm)?;
            }
            let scale = (correction != 1.0).then(|| Tensor::from(1.0 / correction));
            let learning_rate = self.schedule.lr(self.step);
            self.optimizer.step(learning_rate, scale.as_ref())?;
            self.model.zero_grad()?;
            StepOutcome {
                loss_part: scaled(loss_part, correction)?,
                grad_norm,
                learning_rate,
            }
        };
        self.step += 1;
        Ok(outcome)
    }

    fn forward_backward(&mut self, microbatches: &[Batch], count: f64) -> Result<Tensor> {
        let cx = Context::training(self.step);
        let mut total: Option<Tensor> = None;
        for (index, batch) in microbatches.iter().enumerate() {
            let sync = match index + 1 == microbatches.len() {
                true => Sync::Reduce,
                false => Sync::Accumulate,
            };
            let (run, loss) = {
                let _span = self.ledger.enter(SpanKind::Forward, "forward");
                let run = self.model.forward(&batch.inputs, &cx)?;
                let sum = self.model.loss(run.output(), &batch.targets)?;
                (run, sum.f_div_scalar(count)?)
            };
            {
                let _span = self.ledger.enter(SpanKind::Backward, "backward");
                self.model.backward(run, &loss, sync)?;
            }
            let loss = loss.detach();
            total = Some(match total {
                Some(total) => total.f_add(&loss)?,
                None => loss,
            });
        }
        total.ok_or_else(|| crate::TrainError::Dataset("a step needs at least one batch".into()))
    }

    /// Targets in the global batch: each rank's own count, summed, so that ranks may differ.
    fn start_counting(&self, batches: &[Batch]) -> Result<Counting> {
        let own: i64 = batches.iter().map(|batch| batch.num_targets).sum();
        // Where nothing is sent, every rank is taken to be like this one.
        let own = if self.is_dry_run {
            own * self.data_group.size() as i64
        } else {
            own
        };
        let count = Tensor::from_slice(&[own]);
        let work = self
            .data_group
            .all_reduce(&count, ReduceOp::Sum, Purpose::Control)?;
        Ok(Counting { count, work })
    }

    /// The mean loss over the global batch, from every rank's part.
    pub fn global_loss(&self, loss_part: &Tensor) -> Result<f64> {
        let total = loss_part.f_to_kind(Kind::Double)?.f_view(1)?;
        self.data_group
            .all_reduce(&total, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        Ok(f64::try_from(total.f_squeeze()?)?)
    }

    /// The mean loss over batches that are only looked at.
    pub fn evaluate(&self, batches: &[Batch]) -> Result<f64> {
        let _span = self.ledger.enter(SpanKind::Evaluation, "evaluation");
        let count = self.start_counting(batches)?.finish()?;
        let cx = Context::evaluation(self.step);
        let mut total = Tensor::from(0f64);
        for batch in batches {
            let loss = tch::no_grad(|| -> Result<Tensor> {
                let run = self.model.forward(&batch.inputs, &cx)?;
                Ok(self.model.loss(&run.into_output(), &batch.targets)?)
            })?;
            total = total.f_add(&loss.f_div_scalar(count)?.f_to_kind(Kind::Double)?)?;
        }
        self.global_loss(&total)
    }

    /// Steps taken so far.
    pub fn steps_taken(&self) -> u64 {
        self.step
    }

    /// Goes on as if so many steps had been taken.
    pub fn resume_at(&mut self, step: u64) {
        self.step = step;
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
    pub fn model(&self) -> &Ddp<Box<dyn Model>> {
        &self.model
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

/// A number on the device times a number here; most often by one, which changes nothing.
fn scaled(tensor: Tensor, factor: f64) -> Result<Tensor> {
    match factor == 1.0 {
        true => Ok(tensor),
        false => Ok(tensor.f_mul_scalar(factor)?),
    }
}

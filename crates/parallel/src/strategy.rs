//! The interface between a training loop and a parallelism strategy, and what a pipeline needs of its stages.

use tch::Tensor;
use trainyard_cost::CostModel;
use trainyard_nn::weight_gradients::WeightGradients;
use trainyard_nn::{Context, Model, Parameter, Run};
use trainyard_optim::{DeviceScalars, Optimizer};
use trainyard_trace::{Ledger, SpanKind};

use crate::error::Result;
use crate::loss_scale::backward_loss;
use crate::offload::Counters;
use crate::param_state::ParamState;

/// How a backward pass synchronizes gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradSync {
    /// Reduces them over all ranks: the last pass before an optimizer step.
    Full,
    /// Accumulates them: a pass of gradient accumulation. Sharded gradients are still reduce-scattered to shards.
    ShardOnly,
    /// Accumulates them unsharded, without communication: a later pass or [`DataParallelWrapper::start_reduce`] reduces them.
    None,
}

/// A step of an optimizer, which a strategy may take unit by unit.
pub struct OptimizerStep<'a> {
    /// The optimizer.
    pub optimizer: &'a mut dyn Optimizer,
    /// The learning rate.
    pub lr: f64,
    /// What the optimizer reads on the device.
    pub scalars: DeviceScalars<'a>,
}

impl OptimizerStep<'_> {
    /// Updates every parameter that has a gradient.
    pub(crate) fn take(&mut self) -> Result<()> {
        Ok(self.optimizer.step_with(self.lr, self.scalars)?)
    }
}

/// Visits parameters that are in memory.
pub type StateVisitor<'a> = dyn FnMut(&[Parameter]) -> Result<()> + 'a;

/// Changes parameters that are in memory, and gives them optimizer states.
pub type StateLoader<'a> = dyn FnMut(&[Parameter], &mut dyn Optimizer) -> Result<()> + 'a;

/// One micro-batch of a step.
pub struct Microbatch<'a> {
    /// Inputs of the model.
    pub inputs: &'a Tensor,
    /// Targets of the loss.
    pub targets: &'a Tensor,
    /// Context of the forward pass.
    pub cx: Context,
}

/// The inputs of a training step.
pub struct StepInputs<'a> {
    /// The micro-batches, in order.
    pub microbatches: Vec<Microbatch<'a>>,
    /// Divisor of the summed losses: the number of targets in the global batch.
    pub count: f64,
    /// Factor of the loss before backward (loss scaling).
    pub scale: f64,
    /// Whether a loss that is not finite makes all gradients NaN, so that nobody takes the step.
    pub is_guarded: bool,
    /// The ledger that records the spans of the step.
    pub ledger: &'a Ledger,
}

/// A model trained on many ranks: what a training step needs.
///
/// Its parameters are the ones that this rank trains: full parameters or shards. Optimizers, gradient clipping and
/// checkpoints work on them and need only their layouts.
pub trait Strategy: Model + CostModel {
    /// Runs forward and backward of all micro-batches: gradients become those of the global batch. Returns this rank's
    /// loss, if it computes one.
    fn run_step(&self, step: &StepInputs<'_>) -> Result<Option<Tensor>>;

    /// Runs forward of all micro-batches without gradients. Returns this rank's loss, if it computes one.
    fn evaluate(&self, step: &StepInputs<'_>) -> Result<Option<Tensor>>;

    /// Clears the gradients of all parameters.
    fn zero_grad(&self) -> Result<()>;

    /// Steps the optimizer. A strategy that steps per unit calls the optimizer several times, each time with the
    /// gradients of one unit only.
    fn optimizer_step(&self, step: &mut OptimizerStep<'_>) -> Result<()> {
        step.take()
    }

    /// This rank's replicas of tied parameters that another rank owns. They are trained here too, but must not be
    /// counted twice.
    fn tied_replicas(&self) -> Vec<Parameter> {
        Vec::new()
    }

    /// Whether this rank reads the inputs of a batch: in a pipeline, only the ranks of the first stage do.
    fn reads_inputs(&self) -> bool {
        true
    }

    /// Whether this rank reads the targets of a batch: in a pipeline, only the ranks of the last stage do.
    fn reads_targets(&self) -> bool {
        true
    }

    /// Waits for communication that a step left in flight, and makes replicas the same, buffers included. All ranks must call
    /// this.
    fn wait_pending(&self) -> Result<()> {
        Ok(())
    }

    /// Visits this rank's parameters while they are in memory: all at once or, if they are offloaded, part by part. Their
    /// optimizer states are in memory too if an optimizer is given.
    fn visit_states(
        &self,
        _optimizer: Option<&dyn Optimizer>,
        visitor: &mut StateVisitor<'_>,
    ) -> Result<()> {
        visitor(&self.parameters())
    }

    /// As [`visit_states`](Self::visit_states), for a visitor that changes the parameters and gives them optimizer states.
    fn load_states(
        &self,
        optimizer: &mut dyn Optimizer,
        visitor: &mut StateLoader<'_>,
    ) -> Result<()> {
        visitor(&self.parameters(), optimizer)
    }

    /// What the strategy remembers of its parameters from one step to the next, for checkpoints.
    fn param_states(&self) -> Result<Vec<ParamState>> {
        Ok(Vec::new())
    }

    /// Counters of the offload files, if states are offloaded.
    fn offload_counters(&self) -> Vec<Counters> {
        Vec::new()
    }
}

/// A data-parallel wrapper of a model: single passes, for a loop of one's own and for the stages of a pipeline.
pub trait DataParallelWrapper: Strategy {
    /// Runs the model on this rank's part of the batch.
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Run>;

    /// Computes gradients and, with [`GradSync::Full`], waits until they are reduced over all ranks. Returns the
    /// names of parameters that no rank used, if the wrapper looks for them.
    fn backward(&self, run: Run, loss: &Tensor, sync: GradSync) -> Result<Vec<String>> {
        self.start_backward(run, loss, sync)?;
        self.finish_reduce()
    }

    /// Computes gradients and starts their reduction, which [`finish_reduce`](Self::finish_reduce) waits for.
    fn start_backward(&self, run: Run, loss: &Tensor, sync: GradSync) -> Result<()>;

    /// As [`start_backward`](Self::start_backward), interleaved with `other` if the wrapper supports it: each computes
    /// while the other communicates.
    fn start_backward_interleaved(
        &self,
        run: Run,
        loss: &Tensor,
        sync: GradSync,
        other: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        other()?;
        self.start_backward(run, loss, sync)
    }

    /// Whether backward with [`GradSync::Full`] needs a hook call for every accumulated gradient.
    fn needs_grad_hooks(&self) -> bool {
        true
    }

    /// Prepares for weight gradients that an earlier pass has deferred; they are accumulated as with
    /// [`GradSync::None`].
    fn begin_weight_grads(&self) -> Result<()> {
        Ok(())
    }

    /// Starts to reduce the gradients that passes with [`GradSync::None`] accumulated. `sync` has the same meaning
    /// as for a backward pass.
    fn start_reduce(&self, sync: GradSync) -> Result<()>;

    /// Waits for the reductions in flight. Returns the names of parameters that no rank used, if the wrapper looks for
    /// them.
    fn finish_reduce(&self) -> Result<Vec<String>>;

    /// Gathers all parameters and keeps them for several passes.
    fn unshard(&self) -> Result<()> {
        Ok(())
    }

    /// Releases the parameters that [`unshard`](Self::unshard) gathered.
    fn reshard(&self) -> Result<()> {
        Ok(())
    }

    /// Whether [`Strategy::optimizer_step`] steps unit by unit. The wrapper then sets the gradients itself, and no other
    /// parameter may have one at that time.
    fn steps_per_unit(&self) -> bool {
        false
    }
}

/// [`Strategy::run_step`] of a wrapper: one micro-batch after the other.
pub(crate) fn run_microbatches(
    model: &impl DataParallelWrapper,
    step: &StepInputs<'_>,
) -> Result<Option<Tensor>> {
    let mut total: Option<Tensor> = None;
    for (index, microbatch) in step.microbatches.iter().enumerate() {
        let sync = if index + 1 == step.microbatches.len() {
            GradSync::Full
        } else {
            GradSync::ShardOnly
        };
        // With several micro-batches, weight gradients are added in place to those of earlier passes, unless
        // hooks must see each of them.
        let weights = WeightGradients::default();
        let (run, loss) = {
            let _span = step.ledger.enter(SpanKind::Forward, "forward");
            let run = match step.microbatches.len() {
                1 => model.forward(microbatch.inputs, &microbatch.cx)?,
                _ => weights.record(|| model.forward(microbatch.inputs, &microbatch.cx))?,
            };
            let sum = model.loss(run.output(), microbatch.targets)?;
            (run, sum.f_div_scalar(step.count)?)
        };
        {
            let _span = step.ledger.enter(SpanKind::Backward, "backward");
            if sync == GradSync::ShardOnly || !model.needs_grad_hooks() {
                weights.add_in_place();
            }
            let scaled = backward_loss(&loss, step.scale, step.is_guarded)?;
            model.backward(run, &scaled, sync)?;
        }
        total = Some(accumulated(total, loss.f_detach()?)?);
    }
    Ok(total)
}

/// [`Strategy::evaluate`] of a wrapper.
pub(crate) fn evaluate_microbatches(
    model: &impl DataParallelWrapper,
    step: &StepInputs<'_>,
) -> Result<Option<Tensor>> {
    let mut total: Option<Tensor> = None;
    for microbatch in &step.microbatches {
        let loss = tch::no_grad(|| -> Result<Tensor> {
            let run = model.forward(microbatch.inputs, &microbatch.cx)?;
            Ok(model.loss(&run.into_output(), microbatch.targets)?)
        })?;
        total = Some(accumulated(total, loss.f_div_scalar(step.count)?)?);
    }
    Ok(total)
}

/// Adds `more` to an optional running total.
pub(crate) fn accumulated(total: Option<Tensor>, more: Tensor) -> Result<Tensor> {
    match total {
        Some(total) => Ok(total.f_add(&more)?),
        None => Ok(more),
    }
}

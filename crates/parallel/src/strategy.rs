//! What a training loop asks of a strategy.

use tch::Tensor;
use trainyard_nn::{Context, Model, Parameter, Run};
use trainyard_trace::{Ledger, SpanKind};

use crate::error::Result;
use crate::offload::Counters;
use crate::volume::{StateBytes, Volume};

/// What becomes of the gradients at the end of a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sync {
    /// They are reduced over all ranks: the last pass before an optimiser step.
    Reduce,
    /// They add up: a pass of gradient accumulation.
    Accumulate,
}

/// The optimiser, as far as a strategy deals with it.
pub trait Update {
    /// Changes every parameter that has a gradient.
    fn step(&mut self) -> Result<()>;

    /// Its tensors so far, each as `kind.<parameter>`.
    fn states(&self) -> Vec<(String, Tensor)>;
}

/// One micro-batch of a step.
pub struct Pass<'a> {
    /// What goes into the model.
    pub inputs: &'a Tensor,
    /// What should come out.
    pub targets: &'a Tensor,
    /// What the model is told beside.
    pub cx: Context,
}

/// The micro-batches of a step, and what becomes of their losses.
pub struct Step<'a> {
    /// In order.
    pub passes: Vec<Pass<'a>>,
    /// What summed losses are divided by.
    pub count: f64,
    /// What losses are multiplied by before backward.
    pub scale: f64,
    /// Where spans are written.
    pub ledger: &'a Ledger,
}

/// A model whose gradients become those of all ranks' batches.
///
/// Its parameters are what this rank trains: whole ones, or shards. Optimisers, clipping and
/// checkpoints work on them and need not know more than their layouts.
pub trait Strategy: Model {
    /// Runs the model on this rank's part of the batch.
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Run>;

    /// Computes gradients and, with [`Sync::Reduce`], returns once they are those of all ranks.
    /// Returns the names of parameters that no rank used, if those were asked for.
    fn backward(&self, run: Run, loss: &Tensor, sync: Sync) -> Result<Vec<String>>;

    /// Forward and backward of all micro-batches. Returns the loss of what this rank saw, if it has it.
    fn run_step(&self, step: &Step<'_>) -> Result<Option<Tensor>> {
        let mut total: Option<Tensor> = None;
        for (index, pass) in step.passes.iter().enumerate() {
            let sync = match index + 1 == step.passes.len() {
                true => Sync::Reduce,
                false => Sync::Accumulate,
            };
            let (run, loss) = {
                let _span = step.ledger.enter(SpanKind::Forward, "forward");
                let run = self.forward(pass.inputs, &pass.cx)?;
                let sum = self.loss(run.output(), pass.targets)?;
                (run, sum.f_div_scalar(step.count)?)
            };
            {
                let _span = step.ledger.enter(SpanKind::Backward, "backward");
                self.backward(run, &scaled(&loss, step.scale)?, sync)?;
            }
            total = Some(added(total, loss.f_detach()?)?);
        }
        Ok(total)
    }

    /// Forward of all micro-batches alone. Returns the loss of what this rank saw, if it has it.
    fn evaluate(&self, step: &Step<'_>) -> Result<Option<Tensor>> {
        let mut total: Option<Tensor> = None;
        for pass in &step.passes {
            let loss = tch::no_grad(|| -> Result<Tensor> {
                let run = self.forward(pass.inputs, &pass.cx)?;
                Ok(self.loss(&run.into_output(), pass.targets)?)
            })?;
            total = Some(added(total, loss.f_div_scalar(step.count)?)?);
        }
        Ok(total)
    }

    /// Whether gradients of weights may come after [`Strategy::backward`], to be reduced by
    /// [`Strategy::reduce`].
    fn can_defer(&self) -> bool {
        false
    }

    /// Reduces what passes with [`Sync::Accumulate`] have left.
    fn reduce(&self) -> Result<()> {
        Ok(())
    }

    /// Leaves every parameter without a gradient, ready for the next step.
    fn zero_grad(&self) -> Result<()>;

    /// Lets the optimiser step. A strategy that keeps states elsewhere calls it several times, with a
    /// part of them at hand each time and gradients for that part alone.
    fn update(&self, update: &mut dyn Update) -> Result<()> {
        update.step()
    }

    /// Parameters among this rank's of which another rank holds the original: trained here too, but
    /// not to be counted twice.
    fn copies(&self) -> Vec<Parameter> {
        Vec::new()
    }

    /// Waits for what a step has left under way for the next one.
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    /// Shows every parameter while its memory is there.
    fn with_parameters(&self, visitor: &mut dyn FnMut(&Parameter) -> Result<()>) -> Result<()> {
        self.parameters().iter().try_for_each(visitor)
    }

    /// What was moved between memory and where states are kept, if they are kept elsewhere.
    fn offload_counters(&self) -> Vec<Counters> {
        Vec::new()
    }

    /// What all `world_size` ranks send in a step of so many micro-batches, by formula.
    fn volume(&self, num_microbatches: usize, world_size: usize) -> Volume;

    /// What this rank holds between steps with `num_moments` states of the optimiser per parameter, by
    /// formula.
    fn states(&self, num_moments: u64) -> StateBytes;
}

/// A number times a factor; most often by one, which changes nothing.
pub(crate) fn scaled(tensor: &Tensor, factor: f64) -> Result<Tensor> {
    match factor == 1.0 {
        true => Ok(tensor.shallow_clone()),
        false => Ok(tensor.f_mul_scalar(factor)?),
    }
}

/// A sum so far and one more.
pub(crate) fn added(total: Option<Tensor>, more: Tensor) -> Result<Tensor> {
    match total {
        Some(total) => Ok(total.f_add(&more)?),
        None => Ok(more),
    }
}

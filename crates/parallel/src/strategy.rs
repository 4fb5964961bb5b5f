//! What a training loop asks of a strategy.

use tch::Tensor;
use trainyard_nn::weight_gradients::WeightGradients;
use trainyard_nn::{Context, Model, Parameter, Run};
use trainyard_trace::{Ledger, SpanKind};

use crate::error::Result;
use crate::loss_scale::scaled;
use crate::offload::Counters;
use crate::volume::{StateBytes, Volume};

/// What becomes of the gradients at the end of a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sync {
    /// They are reduced over all ranks: the last pass before an optimiser step.
    Reduce,
    /// They add up: a pass of gradient accumulation. What is sharded is reduced to shards all the same.
    Accumulate,
    /// They add up whole, sharded or not: a later pass, or [`Strategy::start_reduce`], reduces them.
    Keep,
}

/// How often a step does what costs messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passes {
    /// Forward and backward passes.
    pub num_microbatches: u64,
    /// Reductions of gradients that are sharded.
    pub num_reductions: u64,
    /// How often all parameters are gathered for several passes; none where each pass gathers its own.
    pub num_gathers: Option<u64>,
}

impl Passes {
    /// Every pass for itself.
    pub fn each(num_microbatches: usize) -> Passes {
        Passes {
            num_microbatches: num_microbatches as u64,
            num_reductions: num_microbatches as u64,
            num_gathers: None,
        }
    }
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
    fn backward(&self, run: Run, loss: &Tensor, sync: Sync) -> Result<Vec<String>> {
        self.start_backward(run, loss, sync)?;
        self.finish_reduce()
    }

    /// Computes gradients. Their reduction is begun, and ended by [`Strategy::finish_reduce`].
    fn start_backward(&self, run: Run, loss: &Tensor, sync: Sync) -> Result<()>;

    /// The same while `other` runs, if the strategy can: each computes while the other communicates.
    fn start_backward_beside(
        &self,
        run: Run,
        loss: &Tensor,
        sync: Sync,
        other: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        other()?;
        self.start_backward(run, loss, sync)
    }

    /// Whether backward with [`Sync::Reduce`] must hear of every gradient as it is added.
    fn watches_gradients(&self) -> bool {
        true
    }

    /// Gradients of weights are about to come that an earlier pass has put off; as with [`Sync::Keep`].
    fn expect_weights(&self) -> Result<()> {
        Ok(())
    }

    /// Begins to reduce what passes with [`Sync::Keep`] have left. `sync` is as for a backward pass.
    fn start_reduce(&self, sync: Sync) -> Result<()>;

    /// Waits for the reductions under way. Returns the names of parameters that no rank used, if those
    /// were asked for.
    fn finish_reduce(&self) -> Result<Vec<String>>;

    /// Gathers all parameters, to stay for several passes.
    fn unshard(&self) -> Result<()> {
        Ok(())
    }

    /// Lets go of what [`Strategy::unshard`] has gathered.
    fn reshard(&self) -> Result<()> {
        Ok(())
    }

    /// Forward and backward of all micro-batches. Returns the loss of what this rank saw, if it has it.
    fn run_step(&self, step: &Step<'_>) -> Result<Option<Tensor>> {
        let mut total: Option<Tensor> = None;
        for (index, pass) in step.passes.iter().enumerate() {
            let sync = match index + 1 == step.passes.len() {
                true => Sync::Reduce,
                false => Sync::Accumulate,
            };
            // Where passes add up, products go straight into the gradients that are there, as long as
            // nobody listens for them.
            let weights = WeightGradients::default();
            let (run, loss) = {
                let _span = step.ledger.enter(SpanKind::Forward, "forward");
                let run = match step.passes.len() {
                    1 => self.forward(pass.inputs, &pass.cx)?,
                    _ => weights.during(|| self.forward(pass.inputs, &pass.cx))?,
                };
                let sum = self.loss(run.output(), pass.targets)?;
                (run, sum.f_div_scalar(step.count)?)
            };
            {
                let _span = step.ledger.enter(SpanKind::Backward, "backward");
                if sync == Sync::Accumulate || !self.watches_gradients() {
                    weights.add_in_place();
                }
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

    /// Leaves every parameter without a gradient, ready for the next step.
    fn zero_grad(&self) -> Result<()>;

    /// Lets the optimiser step. A strategy that keeps states elsewhere calls it several times, with a
    /// part of them at hand each time and gradients for that part alone.
    fn update(&self, update: &mut dyn Update) -> Result<()> {
        update.step()
    }

    /// Whether [`Strategy::update`] goes by parts. Its parameters' gradients are then where the strategy
    /// has put them, and no other may have one meanwhile.
    fn updates_by_parts(&self) -> bool {
        false
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

    /// What all `world_size` ranks send in a step of such passes, by formula.
    fn volume(&self, passes: Passes, world_size: usize) -> Volume;

    /// What this rank holds between steps with `num_moments` states of the optimiser per parameter, by
    /// formula.
    fn states(&self, num_moments: u64) -> StateBytes;
}

/// A sum so far and one more.
pub(crate) fn added(total: Option<Tensor>, more: Tensor) -> Result<Tensor> {
    match total {
        Some(total) => Ok(total.f_add(&more)?),
        None => Ok(more),
    }
}

//! What a training loop asks of a strategy.

use tch::Tensor;
use trainyard_nn::{Context, Model, Parameter, Run};

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

    /// Leaves every parameter without a gradient, ready for the next step.
    fn zero_grad(&self) -> Result<()>;

    /// Lets the optimiser step. A strategy that keeps states elsewhere calls it several times, with a
    /// part of them at hand each time and gradients for that part alone.
    fn update(&self, update: &mut dyn Update) -> Result<()> {
        update.step()
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

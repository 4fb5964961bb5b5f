//! Peak memory of every class of ranks, term by term.

use crate::moments::at_peak;
use crate::{Moment, Overhead, Overheads, RankClass, Software, States, Strategy};
use trainyard_arch::DecoderConfig;

/// The peak memory of one class of ranks, in bytes. Each term is what exists at the moment of the peak.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Memory {
    /// The class of ranks.
    pub class: RankClass,
    /// When the peak occurs.
    pub moment: Moment,
    /// Parameters, gradients and optimizer states.
    pub states: States,
    /// Activations that are saved for the backward pass, of all micro-batches in flight.
    pub activations: f64,
    /// Recomputed activations of the one block that runs its backward pass, and the gradients inside it.
    pub backward: f64,
    /// Activations of the embedding.
    pub embedding: f64,
    /// Logits, their gradient and the loss.
    pub logits: f64,
    /// Communication buffers: gradients that are being reduced, and sends and receives between stages.
    pub buffers: f64,
    /// What is not in tensors.
    pub overhead: Overhead,
}

impl Memory {
    /// The bytes of tensors.
    pub const fn tensors(&self) -> f64 {
        self.states.on_device()
            + self.activations
            + self.backward
            + self.embedding
            + self.logits
            + self.buffers
    }

    /// The sum of all terms.
    pub const fn total(&self) -> f64 {
        self.tensors() + self.overhead.total()
    }
}

/// The peak memory of every class of ranks.
pub fn memory(
    shape: &DecoderConfig,
    strategy: &Strategy,
    software: &Software,
    overheads: &Overheads,
) -> Vec<Memory> {
    let of_class = |rank_layers| {
        let memory = at_peak(shape, strategy, software, &rank_layers);
        Memory {
            overhead: overheads.of(&strategy.degrees, memory.tensors()),
            ..memory
        }
    };
    let layers_by_class = strategy.layers_by_class(shape);
    layers_by_class.into_iter().map(of_class).collect()
}

/// The class of ranks with the highest peak memory.
pub fn peak(memories: &[Memory]) -> Option<&Memory> {
    let by_total = |a: &&Memory, b: &&Memory| a.total().total_cmp(&b.total());
    memories.iter().max_by(by_total)
}

//! A model: a list of units and a loss.

use std::rc::Rc;

use tch::Tensor;

use crate::{Module, Result, Unit};

/// What is trained.
pub trait Model: Module {
    /// The units in order of execution: the output of one is the input of the next.
    fn units(&self) -> Vec<&dyn Unit>;

    /// The loss summed over `targets`, not their mean: the count may be spread over many ranks, so
    /// the caller divides by the global one.
    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor>;

    /// Bytes that the layers of all ranks which share a batch of `num_tokens` send to each other in
    /// one forward and backward pass, by formula.
    fn sent_by_layers(&self, _num_tokens: u64) -> u64 {
        0
    }
}

impl<M: Model + ?Sized> Model for Rc<M> {
    fn units(&self) -> Vec<&dyn Unit> {
        (**self).units()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        (**self).loss(output, targets)
    }

    fn sent_by_layers(&self, num_tokens: u64) -> u64 {
        (**self).sent_by_layers(num_tokens)
    }
}

impl<M: Model + ?Sized> Model for Box<M> {
    fn units(&self) -> Vec<&dyn Unit> {
        (**self).units()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        (**self).loss(output, targets)
    }

    fn sent_by_layers(&self, num_tokens: u64) -> u64 {
        (**self).sent_by_layers(num_tokens)
    }
}

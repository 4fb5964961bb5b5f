//! A model: a list of units and a loss.

use std::rc::Rc;

use tch::Tensor;

use crate::{Module, Result, Unit};

/// A model that can be trained: units and a loss.
pub trait Model: Module {
    /// The units in order of execution: the output of one is the input of the next.
    fn units(&self) -> Vec<&dyn Unit>;

    /// The loss summed over `targets`, not averaged: targets may be distributed over many ranks, so the caller
    /// divides by their global number.
    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor>;

    /// The bytes that tensor- and context-parallel layers send in one forward and backward pass over a batch of
    /// `num_tokens`, summed over the ranks that work on that batch, from a closed formula; `None` if there is none.
    fn layer_comm_bytes(&self, _num_tokens: u64) -> Option<u64> {
        None
    }
}

impl<M: Model + ?Sized> Model for Rc<M> {
    fn units(&self) -> Vec<&dyn Unit> {
        (**self).units()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        (**self).loss(output, targets)
    }

    fn layer_comm_bytes(&self, num_tokens: u64) -> Option<u64> {
        (**self).layer_comm_bytes(num_tokens)
    }
}

impl<M: Model + ?Sized> Model for Box<M> {
    fn units(&self) -> Vec<&dyn Unit> {
        (**self).units()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        (**self).loss(output, targets)
    }

    fn layer_comm_bytes(&self, num_tokens: u64) -> Option<u64> {
        (**self).layer_comm_bytes(num_tokens)
    }
}

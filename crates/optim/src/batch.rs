//! The operands of one kernel call: parameters of one dtype that have a gradient in this step, their
//! gradients and their state.

use tch::{Kind, Tensor};
use trainyard_torch::kernel;

use crate::Result;

/// Lists of equal length, one entry per parameter.
pub(crate) struct Batch<const N: usize> {
    pub(crate) kind: Kind,
    /// The indices of the parameters among all of the optimizer.
    pub(crate) indices: Vec<usize>,
    pub(crate) parameters: Vec<Tensor>,
    pub(crate) gradients: Vec<Tensor>,
    /// One list per state slot.
    pub(crate) slots: [Vec<Tensor>; N],
}

impl<const N: usize> Batch<N> {
    pub(crate) fn new(kind: Kind) -> Batch<N> {
        Batch {
            kind,
            indices: Vec::new(),
            parameters: Vec::new(),
            gradients: Vec::new(),
            slots: std::array::from_fn(|_| Vec::new()),
        }
    }

    pub(crate) fn push(
        &mut self,
        index: usize,
        parameter: &Tensor,
        gradient: Tensor,
        state: &[Tensor],
    ) {
        self.indices.push(index);
        self.parameters.push(parameter.shallow_clone());
        self.gradients.push(gradient);
        for (slot, tensor) in self.slots.iter_mut().zip(state) {
            slot.push(tensor.shallow_clone());
        }
    }

    /// Divides all gradients by `scale`, without reading it on the host.
    pub(crate) fn divide_gradients(&self, scale: Option<&Tensor>) -> Result<()> {
        match scale {
            Some(scale) => Ok(kernel::foreach_mul_tensor_(
                &self.gradients,
                &scale.f_reciprocal()?,
            )?),
            None => Ok(()),
        }
    }

    /// The scale for a fused kernel, which reads it as float32. That is not precise enough for float64
    /// gradients: those are divided here, and `None` is returned.
    pub(crate) fn fused_scale(&self, scale: Option<&Tensor>) -> Result<Option<Tensor>> {
        if self.kind == Kind::Double {
            self.divide_gradients(scale)?;
            return Ok(None);
        }
        Ok(scale
            .map(|scale| scale.f_to_kind(Kind::Float))
            .transpose()?)
    }
}

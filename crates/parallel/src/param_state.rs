//! What a strategy remembers of its parameters from one step to the next.

use tch::Tensor;
use trainyard_torch::{Group, ReduceOp, Result};
use trainyard_trace::Purpose;

/// A tensor in the shape of a parameter that is part of the training state, beside those of the optimizer.
#[derive(Debug)]
pub struct ParamState {
    /// What it is, such as `gradient_error`.
    pub kind: &'static str,
    /// The name of the parameter.
    pub parameter: String,
    /// The tensor. Loading a checkpoint changes it in place.
    pub tensor: Tensor,
    /// If only the sum over the ranks of a group counts, of which each has a part: that group. Otherwise the tensor is
    /// replicated and sharded as the parameter is.
    pub summed_over: Option<Group>,
}

impl ParamState {
    /// The tensor that a checkpoint saves, which does not depend on the number of ranks. This is a collective call.
    pub fn saved(&self) -> Result<Tensor> {
        let Some(group) = &self.summed_over else {
            return Ok(self.tensor.shallow_clone());
        };
        let sum = self.tensor.f_detach_copy()?;
        group
            .all_reduce(&sum, ReduceOp::Sum, Purpose::State)?
            .wait()?;
        Ok(sum)
    }

    /// Takes over a tensor that a checkpoint has saved: of a sum, every rank takes an equal part.
    pub fn load(&self, saved: &Tensor) -> Result<()> {
        let num_parts = self.summed_over.as_ref().map_or(1, Group::size);
        let mut tensor = self.tensor.shallow_clone();
        tch::no_grad(|| {
            let part = saved.f_view_as(&tensor)?.f_div_scalar(num_parts as f64)?;
            Ok(tensor.f_copy_(&part)?)
        })
    }
}

//! Gradients with a partial placement: each of several ranks holds a partial sum for the same parameter.
//!
//! Under sequence parallelism each tensor-parallel rank sees only some positions, so the gradients of norms are
//! partial sums; so are those of a weight that several ranks replicate while each computes with a part of the
//! activations. The partial sums are all-reduced once per step, with one collective per group, after the
//! data-parallel reduction: sums may be taken in any order.

use tch::Tensor;
use trainyard_nn::Parameter;
use trainyard_torch::{Group, ReduceOp, kernel, memory};
use trainyard_trace::{MemoryKind, Purpose};

use crate::error::Result;
use trainyard_cost::PartialGradBytes;

/// Parameters with partial gradients, by the group that reduces them.
pub(crate) struct PartialGrads(Vec<(Group, Vec<Parameter>)>);

impl PartialGrads {
    /// Selects the parameters with partial gradients.
    pub(crate) fn of(parameters: &[Parameter]) -> PartialGrads {
        let mut groups: Vec<(Group, Vec<Parameter>)> = Vec::new();
        for parameter in parameters.iter().filter(|p| p.is_trainable()) {
            let Some(group) = parameter.partial_grad_group() else {
                continue;
            };
            match groups
                .iter_mut()
                .find(|(known, _)| known.name() == group.name())
            {
                Some((_, members)) => members.push(parameter.clone()),
                None => groups.push((group.clone(), vec![parameter.clone()])),
            }
        }
        PartialGrads(groups)
    }

    /// Sums the gradients over the ranks of each group.
    pub(crate) fn all_reduce(&self) -> Result<()> {
        for (group, parameters) in &self.0 {
            let mut gradients = Vec::with_capacity(parameters.len());
            for parameter in parameters {
                gradients.extend(
                    parameter
                        .gradient()?
                        .filter(|gradient| gradient.numel() > 0),
                );
            }
            if !gradients.is_empty() {
                tch::no_grad(|| all_reduce_coalesced(group, &gradients))?;
            }
        }
        Ok(())
    }

    /// Bytes of the gradients per group, with `width` bytes per element.
    pub(crate) fn bytes(&self, width: u64) -> Vec<PartialGradBytes> {
        let local = |p: &Parameter| p.tensor().numel() as u64 * width;
        let full = |p: &Parameter| p.num_elements() * width;
        let groups = self.0.iter();
        groups
            .map(|(group, parameters)| PartialGradBytes {
                local: parameters.iter().map(local).sum(),
                full: parameters.iter().map(full).sum(),
                num_ranks: group.size() as u64,
            })
            .collect()
    }
}

/// All-reduces several gradients in one flat buffer.
fn all_reduce_coalesced(group: &Group, gradients: &[Tensor]) -> Result<()> {
    let flat = |gradient: &Tensor| gradient.f_reshape(-1i64);
    let flat = gradients.iter().map(flat).collect::<Result<Vec<_>, _>>()?;
    let buffer = memory::scope(MemoryKind::Communication, || Tensor::f_cat(&flat, 0))?;
    group
        .all_reduce(&buffer, ReduceOp::Sum, Purpose::Gradient)?
        .wait()?;
    let lengths: Vec<i64> = flat.iter().map(|tensor| tensor.numel() as i64).collect();
    let sums = buffer.f_split_with_sizes(&lengths[..], 0)?;
    let views = sums
        .iter()
        .zip(gradients)
        .map(|(sum, gradient)| sum.f_view_as(gradient));
    let views = views.collect::<Result<Vec<_>, _>>()?;
    Ok(kernel::foreach_copy_(gradients, &views)?)
}

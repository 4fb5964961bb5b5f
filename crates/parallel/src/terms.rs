//! Gradients that are sums of what several ranks found with the same parameter.
//!
//! Where ranks divide the positions between the matrices, each norm's gradient is a term of the whole;
//! so is that of a matrix several ranks hold whole to compute a part with. The terms are added up once
//! a step, in one message per group of ranks, after data-parallel reduction: sums may be taken in any
//! order.

use tch::Tensor;
use trainyard_nn::Parameter;
use trainyard_torch::{Group, ReduceOp, kernel, memory};
use trainyard_trace::{MemoryKind, Purpose};

use crate::error::Result;
use crate::volume::TermBytes;

/// Parameters whose gradients are terms, by the ranks that have the others.
pub(crate) struct Terms(Vec<(Group, Vec<Parameter>)>);

impl Terms {
    /// Those among the parameters this rank trains.
    pub(crate) fn of(parameters: &[Parameter]) -> Terms {
        let mut groups: Vec<(Group, Vec<Parameter>)> = Vec::new();
        for parameter in parameters.iter().filter(|p| p.is_trainable()) {
            let Some(group) = parameter.gradient_terms() else {
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
        Terms(groups)
    }

    /// Adds every rank's gradients up.
    pub(crate) fn add_up(&self) -> Result<()> {
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
                tch::no_grad(|| add_up(group, &gradients))?;
            }
        }
        Ok(())
    }

    /// How much this rank hands in, in gradients of `width` bytes, and how many ranks add up.
    pub(crate) fn bytes(&self, width: u64) -> Vec<TermBytes> {
        let held = |p: &Parameter| p.tensor().numel() as u64 * width;
        let all = |p: &Parameter| p.num_elements() * width;
        let groups = self.0.iter();
        groups
            .map(|(group, parameters)| TermBytes {
                held: parameters.iter().map(held).sum(),
                all: parameters.iter().map(all).sum(),
                num_ranks: group.size() as u64,
            })
            .collect()
    }
}

fn add_up(group: &Group, gradients: &[Tensor]) -> Result<()> {
    let flat = |gradient: &Tensor| gradient.f_reshape(-1i64);
    let rows = gradients.iter().map(flat).collect::<Result<Vec<_>, _>>()?;
    let row = memory::scope(MemoryKind::Communication, || Tensor::f_cat(&rows, 0))?;
    group
        .all_reduce(&row, ReduceOp::Sum, Purpose::Gradient)?
        .wait()?;
    let lengths: Vec<i64> = rows.iter().map(|row| row.numel() as i64).collect();
    let sums = row.f_split_with_sizes(&lengths[..], 0)?;
    let views = sums
        .iter()
        .zip(gradients)
        .map(|(sum, gradient)| sum.f_view_as(gradient));
    let views = views.collect::<Result<Vec<_>, _>>()?;
    Ok(kernel::foreach_copy_(gradients, &views)?)
}

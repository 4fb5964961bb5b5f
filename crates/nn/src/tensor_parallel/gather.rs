//! Sums and gathers inside autograd, and their conjugates in backward.

use tch::Tensor;
use trainyard_torch::{Group, ReduceOp, TorchError, Work, autograd, meta};
use trainyard_trace::Purpose;

use crate::Result;

/// The sum of every rank's `term`; backward hands the gradient on as it is.
pub(super) fn reduced(group: &Group, term: &Tensor) -> Result<Tensor> {
    Ok(autograd::single(
        &[term],
        |_, inputs| {
            // In the term's own memory: it is a product that nothing keeps. Should something keep it
            // after all, the mark lets its backward notice.
            let sum = inputs[0].f_contiguous()?;
            group
                .all_reduce(&sum, ReduceOp::Sum, Purpose::Activation)?
                .wait()?;
            autograd::mark_changed(&sum)?;
            Ok(sum)
        },
        |_, gradients| Ok(vec![gradients[0].as_ref().map(Tensor::shallow_clone)]),
    )?)
}

/// This rank's part of the sum of every rank's `term`; backward gathers the parts' gradients.
pub(super) fn scattered(group: &Group, term: &Tensor) -> Result<Tensor> {
    let again = group.clone();
    Ok(autograd::single(
        &[term],
        |_, inputs| {
            let (part, work) = start_scatter(group, &inputs[0].f_contiguous()?)?;
            work.wait()?;
            Ok(part)
        },
        move |_, gradients| {
            let [Some(gradient)] = gradients else {
                return Ok(vec![None]);
            };
            let (all, work) = start_gather(&again, &gradient.f_contiguous()?)?;
            work.wait()?;
            Ok(vec![Some(all)])
        },
    )?)
}

/// Starts to gather `part` [batch, positions, ..] of every rank, an interval of the tokens each.
pub(super) fn start_gather(group: &Group, part: &Tensor) -> Result<(Tensor, Work), TorchError> {
    let all = meta::new_empty(part, &positions_times(part, group.size() as i64, 1))?;
    let work = group.all_gather(&all, part, Purpose::Activation)?;
    Ok((all, work))
}

/// Starts to add up `terms` [batch, positions, ..] of every rank, each rank to have an interval.
pub(super) fn start_scatter(group: &Group, terms: &Tensor) -> Result<(Tensor, Work), TorchError> {
    let part = meta::new_empty(terms, &positions_times(terms, 1, group.size() as i64))?;
    let work = group.reduce_scatter(&part, terms, ReduceOp::Sum, Purpose::Activation)?;
    Ok((part, work))
}

fn positions_times(like: &Tensor, factor: i64, divisor: i64) -> Vec<i64> {
    let mut shape = like.size();
    if let [_, positions, ..] = &mut shape[..] {
        *positions = *positions * factor / divisor;
    }
    shape
}

//! Collectives as autograd functions, with their conjugate collectives in backward.

use tch::Tensor;
use trainyard_torch::{Group, ReduceOp, TorchError, Work, autograd, meta};
use trainyard_trace::Purpose;

use crate::Result;

/// All-reduces every rank's `partial`; backward passes the gradient on unchanged.
pub(crate) fn all_reduce(group: &Group, partial: &Tensor) -> Result<Tensor> {
    Ok(autograd::apply(
        &[partial],
        |_, inputs| {
            // In place: the partial sum is a matrix product that no backward saves. If one does, the version counter
            // makes it fail.
            let sum = inputs[0].f_contiguous()?;
            group
                .on_caller()
                .all_reduce(&sum, ReduceOp::Sum, Purpose::Activation)?
                .wait()?;
            autograd::increment_version(&sum)?;
            Ok(sum)
        },
        |_, gradients| Ok(vec![gradients[0].as_ref().map(Tensor::shallow_clone)]),
    )?)
}

/// Reduce-scatters every rank's `partial`; backward all-gathers the gradients.
pub(super) fn reduce_scatter(group: &Group, partial: &Tensor) -> Result<Tensor> {
    let again = group.clone();
    Ok(autograd::apply(
        &[partial],
        |_, inputs| {
            let (shard, work) = start_scatter(&group.on_caller(), &inputs[0].f_contiguous()?)?;
            work.wait()?;
            Ok(shard)
        },
        move |_, gradients| {
            let [Some(gradient)] = gradients else {
                return Ok(vec![None]);
            };
            let (all, work) = start_gather(&again.on_caller(), &gradient.f_contiguous()?)?;
            work.wait()?;
            Ok(vec![Some(all)])
        },
    )?)
}

/// All-gathers every rank's `shard`; backward reduce-scatters the gradients.
pub(super) fn all_gather(group: &Group, shard: &Tensor) -> Result<Tensor> {
    let again = group.clone();
    Ok(autograd::apply(
        &[shard],
        |_, inputs| {
            let (all, work) = start_gather(&group.on_caller(), &inputs[0].f_contiguous()?)?;
            work.wait()?;
            Ok(all)
        },
        move |_, gradients| {
            let [Some(gradient)] = gradients else {
                return Ok(vec![None]);
            };
            let (shard, work) = start_scatter(&again.on_caller(), &gradient.f_contiguous()?)?;
            work.wait()?;
            Ok(vec![Some(shard)])
        },
    )?)
}

/// Passes on what every rank has; backward all-reduces the gradients, of which every rank has a part.
pub(crate) fn all_reduce_gradient(group: &Group, x: &Tensor) -> Result<Tensor> {
    let group = group.clone();
    Ok(autograd::apply(
        &[x],
        |_, inputs| Ok(inputs[0].f_alias()?),
        move |_, gradients| {
            let [Some(gradient)] = gradients else {
                return Ok(vec![None]);
            };
            let sum = gradient.f_contiguous()?.f_clone(gradient)?;
            group
                .on_caller()
                .all_reduce(&sum, ReduceOp::Sum, Purpose::Activation)?
                .wait()?;
            Ok(vec![Some(sum)])
        },
    )?)
}

/// Starts an all-gather of `shard` [batch, positions, ..], a range of tokens per rank.
pub(super) fn start_gather(group: &Group, shard: &Tensor) -> Result<(Tensor, Work), TorchError> {
    let all = meta::new_empty(shard, &positions_times(shard, group.size() as i64, 1))?;
    let work = group.all_gather(&all, shard, Purpose::Activation)?;
    Ok((all, work))
}

/// Starts a reduce-scatter of `partial` [batch, positions, ..], a range of tokens per rank.
pub(super) fn start_scatter(group: &Group, partial: &Tensor) -> Result<(Tensor, Work), TorchError> {
    let shard = meta::new_empty(partial, &positions_times(partial, 1, group.size() as i64))?;
    let work = group.reduce_scatter(&shard, partial, ReduceOp::Sum, Purpose::Activation)?;
    Ok((shard, work))
}

fn positions_times(like: &Tensor, factor: i64, divisor: i64) -> Vec<i64> {
    let mut shape = like.size();
    if let [_, positions, ..] = &mut shape[..] {
        *positions = *positions * factor / divisor;
    }
    shape
}

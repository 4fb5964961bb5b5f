//! Several colwise-parallel matrices with the same input.
//!
//! One autograd function covers all of them, so that the input is communicated once: with sequence parallelism
//! forward gathers it once, and backward reduces its gradient once.

use tch::Tensor;
use trainyard_torch::{Group, ReduceOp, TorchError, Work, autograd, meta};
use trainyard_trace::Purpose;

use super::collectives::{start_gather, start_scatter};
use super::{Ranks, SequenceParallel};
use crate::Result;
use crate::weight_gradients::{WeightGrad, flat};

/// `x · weightᵀ` for every weight, on one rank or on several.
pub(super) fn colwise(
    ranks: Option<&Ranks>,
    x: &Tensor,
    weights: &[Tensor],
) -> Result<Vec<Tensor>> {
    let mut inputs = vec![x];
    inputs.extend(weights);
    let backward_ranks = ranks.cloned();
    let weight_grads: Vec<WeightGrad> = weights.iter().map(WeightGrad::of).collect();
    Ok(autograd::apply_multi_output(
        &inputs,
        |saver, inputs| {
            let (x, weights) = (inputs[0].f_contiguous()?, &inputs[1..]);
            let (all, products) = match ranks {
                Some(ranks) if ranks.shards_positions() => gathered_products(ranks, &x, weights)?,
                _ => (x.shallow_clone(), products(&x, weights)?),
            };
            saver.save(match ranks {
                Some(ranks) if ranks.sequence == SequenceParallel::Regather => &x,
                _ => &all,
            });
            weights.iter().for_each(|weight| saver.save(weight));
            Ok(products)
        },
        move |saved, gradients| match saved.split_first() {
            Some((x, weights)) => backward(
                backward_ranks.as_ref(),
                x,
                weights,
                &weight_grads,
                gradients,
            ),
            None => Ok(Vec::new()),
        },
    )?)
}

fn products(x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>, TorchError> {
    let products = weights.iter().map(|w| x.f_linear(w, None::<&Tensor>));
    Ok(products.collect::<Result<_, _>>()?)
}

/// Gathers the input and multiplies it with the weights. Multiplies this rank's shard while the others are in flight.
fn gathered_products(
    ranks: &Ranks,
    shard: &Tensor,
    weights: &[&Tensor],
) -> Result<(Tensor, Vec<Tensor>), TorchError> {
    let (all, work) = start_gather(&ranks.overlapped_group(), shard)?;
    if !ranks.overlap {
        work.wait()?;
        let products = products(&all, weights)?;
        return Ok((all, products));
    }
    let mut outputs = Vec::with_capacity(weights.len());
    for weight in weights {
        let mut shape = all.size();
        if let (Some(last), Some(&features)) = (shape.last_mut(), weight.size().first()) {
            *last = features;
        }
        outputs.push(meta::new_empty(&all, &shape)?);
    }
    let multiply = |from: i64, to: i64| -> Result<(), TorchError> {
        let input = flat(&all)?.f_narrow(0, from, to - from)?;
        products_into(&input, weights, &outputs, from)
    };
    let num_rows = shard.numel() as i64 / width(shard);
    let (start, total) = (
        ranks.group.index() as i64 * num_rows,
        all.numel() as i64 / width(shard),
    );
    products_into(&flat(shard)?, weights, &outputs, start)?;
    work.wait()?;
    if start > 0 {
        multiply(0, start)?;
    }
    if start + num_rows < total {
        multiply(start + num_rows, total)?;
    }
    Ok((all, outputs))
}

/// Writes the products of some rows into the outputs.
fn products_into(
    input: &Tensor,
    weights: &[&Tensor],
    outputs: &[Tensor],
    start: i64,
) -> Result<(), TorchError> {
    let (num_rows, _) = input.size2()?;
    for (weight, output) in weights.iter().zip(outputs) {
        let target = flat(output)?.f_narrow(0, start, num_rows)?;
        let _ = input.f_mm_out(&target, &weight.f_transpose(0, 1)?)?;
    }
    Ok(())
}

/// Reduces the input's gradient over the ranks while computing the weights' gradients.
fn backward(
    ranks: Option<&Ranks>,
    x: &Tensor,
    weights: &[Tensor],
    weight_grads: &[WeightGrad],
    gradients: &[Option<Tensor>],
) -> Result<Vec<Option<Tensor>>, TorchError> {
    let regathering = match ranks {
        Some(ranks) if ranks.sequence == SequenceParallel::Regather => {
            Some(start_gather(&ranks.group, x)?)
        }
        _ => None,
    };
    let rows = flat_gradients(gradients)?;
    let Some(partial) = partial_input_gradient(weights, &rows)? else {
        return Ok((0..=weights.len()).map(|_| None).collect());
    };
    let all = match regathering {
        Some((all, work)) => {
            work.wait()?;
            all
        }
        None => x.shallow_clone(),
    };
    let partial = partial.f_view(&all.size()[..])?;
    let (d_x, reducing) = match ranks {
        Some(ranks) => start_reduction(ranks, partial)?,
        None => (partial, None),
    };
    let all = flat(&all)?;
    let mut found = vec![Some(d_x)];
    for (rows, weight_grad) in rows.into_iter().zip(weight_grads) {
        let gradient = rows.map(|rows| weight_grad.compute(rows, &all));
        found.push(gradient.transpose()?.flatten());
    }
    reducing.map_or(Ok(()), Work::wait)?;
    Ok(found)
}

/// Starts to reduce the input's gradient, and waits for it unless the ranks compute meanwhile.
fn start_reduction(ranks: &Ranks, partial: Tensor) -> Result<(Tensor, Option<Work>), TorchError> {
    let group = ranks.overlapped_group();
    let (d_x, work) = if ranks.shards_positions() {
        start_scatter(&group, &partial)?
    } else {
        let work = start_all_reduce(&group, &partial)?;
        (partial, work)
    };
    if ranks.overlap {
        return Ok((d_x, Some(work)));
    }
    work.wait()?;
    Ok((d_x, None))
}

fn start_all_reduce(group: &Group, partial: &Tensor) -> Result<Work, TorchError> {
    group.all_reduce(partial, ReduceOp::Sum, Purpose::Activation)
}

/// This rank's partial gradient of the input; `None` if no output has a gradient.
fn partial_input_gradient(
    weights: &[Tensor],
    rows: &[Option<Tensor>],
) -> Result<Option<Tensor>, TorchError> {
    let mut partial: Option<Tensor> = None;
    for (weight, rows) in weights.iter().zip(rows) {
        let Some(rows) = rows else { continue };
        partial = Some(match partial {
            Some(mut partial) => partial.f_addmm_(rows, weight)?,
            None => rows.f_mm(weight)?,
        });
    }
    Ok(partial)
}

fn flat_gradients(gradients: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, TorchError> {
    gradients
        .iter()
        .map(|gradient| gradient.as_ref().map(flat).transpose())
        .collect()
}

fn width(tensor: &Tensor) -> i64 {
    tensor.size().last().copied().unwrap_or(1).max(1)
}

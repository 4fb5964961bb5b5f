//! Several matrices with one input, each cut by its outputs.
//!
//! One function for all of them, so that the input travels once: gathered once in forward where the
//! positions are divided, its gradient added up once in backward.

use tch::Tensor;
use trainyard_torch::{Group, ReduceOp, TorchError, Work, autograd, meta};
use trainyard_trace::Purpose;

use super::gather::{start_gather, start_scatter};
use super::{Ranks, Sequence};
use crate::Result;
use crate::weight_gradients::{self, Choice, flat};

/// `x · weightᵀ` for every weight.
pub(super) fn columns(ranks: &Ranks, x: &Tensor, weights: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut inputs = vec![x];
    inputs.extend(weights);
    let later = ranks.clone();
    let choice: Vec<Option<Choice>> = weights.iter().map(weight_gradients::choice).collect();
    Ok(autograd::function(
        &inputs,
        |saver, inputs| {
            let (x, weights) = (inputs[0].f_contiguous()?, &inputs[1..]);
            let (all, products) = match ranks.sequence {
                Sequence::Whole => (x.shallow_clone(), products(&x, weights)?),
                _ => gathered_products(ranks, &x, weights)?,
            };
            saver.save(match ranks.sequence {
                Sequence::Regathered => &x,
                _ => &all,
            });
            weights.iter().for_each(|weight| saver.save(weight));
            Ok(products)
        },
        move |saved, gradients| match saved.split_first() {
            Some((x, weights)) => backward(&later, x, weights, &choice, gradients),
            None => Ok(Vec::new()),
        },
    )?)
}

fn products(x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>, TorchError> {
    let products = weights.iter().map(|w| x.f_linear(w, None::<&Tensor>));
    Ok(products.collect::<Result<_, _>>()?)
}

/// The parts of all ranks, and the products with them. This rank's own part is multiplied while the
/// others' are on their way.
fn gathered_products(
    ranks: &Ranks,
    part: &Tensor,
    weights: &[&Tensor],
) -> Result<(Tensor, Vec<Tensor>), TorchError> {
    let (all, work) = start_gather(&ranks.group, part)?;
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
    let num_rows = part.numel() as i64 / width(part);
    let (start, total) = (
        ranks.group.index() as i64 * num_rows,
        all.numel() as i64 / width(part),
    );
    products_into(&flat(part)?, weights, &outputs, start)?;
    work.wait()?;
    if start > 0 {
        multiply(0, start)?;
    }
    if start + num_rows < total {
        multiply(start + num_rows, total)?;
    }
    Ok((all, outputs))
}

/// Puts the products of some rows where they belong in the outputs.
fn products_into(
    input: &Tensor,
    weights: &[&Tensor],
    outputs: &[Tensor],
    start: i64,
) -> Result<(), TorchError> {
    let (num_rows, _) = input.size2()?;
    for (weight, output) in weights.iter().zip(outputs) {
        let place = flat(output)?.f_narrow(0, start, num_rows)?;
        let _ = input.f_mm_out(&place, &weight.f_transpose(0, 1)?)?;
    }
    Ok(())
}

/// The input's gradient is added up over the ranks while the weights' gradients are computed.
fn backward(
    ranks: &Ranks,
    x: &Tensor,
    weights: &[Tensor],
    choice: &[Option<Choice>],
    gradients: &[Option<Tensor>],
) -> Result<Vec<Option<Tensor>>, TorchError> {
    let regathering = match ranks.sequence {
        Sequence::Regathered => Some(start_gather(&ranks.group, x)?),
        _ => None,
    };
    let rows = flat_gradients(gradients)?;
    let Some(terms) = input_terms(weights, &rows)? else {
        return Ok((0..=weights.len()).map(|_| None).collect());
    };
    let all = match regathering {
        Some((all, work)) => {
            work.wait()?;
            all
        }
        None => x.shallow_clone(),
    };
    let terms = terms.f_view(&all.size()[..])?;
    let (d_x, mut adding_up) = match ranks.sequence {
        Sequence::Whole => {
            let work = add_up(&ranks.group, &terms)?;
            (terms, Some(work))
        }
        _ => {
            let (part, work) = start_scatter(&ranks.group, &terms)?;
            (part, Some(work))
        }
    };
    if !ranks.overlap {
        adding_up.take().map_or(Ok(()), Work::wait)?;
    }
    let all = flat(&all)?;
    let mut found = vec![Some(d_x)];
    for (rows, choice) in rows.into_iter().zip(choice) {
        let gradient =
            rows.map(|rows| weight_gradients::weight_gradient(rows, &all, choice.as_ref()));
        found.push(gradient.transpose()?.flatten());
    }
    adding_up.map_or(Ok(()), Work::wait)?;
    Ok(found)
}

fn add_up(group: &Group, terms: &Tensor) -> Result<Work, TorchError> {
    group.all_reduce(terms, ReduceOp::Sum, Purpose::Activation)
}

/// This rank's term of the input's gradient; none where no product has a gradient.
fn input_terms(weights: &[Tensor], rows: &[Option<Tensor>]) -> Result<Option<Tensor>, TorchError> {
    let mut terms: Option<Tensor> = None;
    for (weight, rows) in weights.iter().zip(rows) {
        let Some(rows) = rows else { continue };
        terms = Some(match terms {
            Some(mut terms) => terms.f_addmm_(rows, weight)?,
            None => rows.f_mm(weight)?,
        });
    }
    Ok(terms)
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

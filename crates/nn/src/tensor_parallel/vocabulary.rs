//! Vocabulary parallelism: every rank has a range of the vocabulary, for embedding lookups and for the loss.

use std::ops::Range;

use tch::{Kind, Tensor};
use trainyard_torch::{Group, IGNORE_INDEX, TorchError, autograd, meta};
use trainyard_trace::Purpose;

use crate::Result;
use crate::loss::wide;
use crate::weight_gradients;

/// The rows of `table` for `tokens`.
pub(super) fn rows(table: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    weight_gradients::embedding(table, tokens)
}

/// The rows of `table`, which has the range `own` of all rows; zero for tokens outside of it.
pub(super) fn sharded_rows(table: &Tensor, tokens: &Tensor, own: &Range<usize>) -> Result<Tensor> {
    let (own, is_outside) = within(tokens, own)?;
    Ok(rows(table, &own)?.f_masked_fill(&is_outside.f_unsqueeze(-1)?, 0.0)?)
}

/// Class ids relative to this rank's range, and a mask of those outside of it, whose ids become 0.
fn within(classes: &Tensor, own: &Range<usize>) -> Result<(Tensor, Tensor), TorchError> {
    let num_own = own.len() as i64;
    let own = classes.f_sub_scalar(own.start as i64)?;
    let is_outside = own.f_lt(0)?.f_bitwise_or_tensor(&own.f_ge(num_own)?)?;
    let own = own.f_masked_fill(&is_outside, 0)?;
    Ok((own, is_outside))
}

/// The summed cross entropy. Ranks exchange three numbers per token: the largest local logit, the local sum of
/// exponentials, and the target's logit on the rank that has it.
pub(super) fn cross_entropy_sum(
    group: &Group,
    logits: &Tensor,
    targets: &Tensor,
    own: &Range<usize>,
) -> Result<Tensor> {
    let num_own = own.len() as i64;
    let targets = targets.f_reshape(-1i64)?;
    let is_counted = targets.f_ne(IGNORE_INDEX)?;
    let (own, is_outside) = within(&targets, own)?;
    let (own, is_inside) = (own.f_unsqueeze(1)?, is_outside.f_bitwise_not()?);
    Ok(autograd::apply(
        &[logits],
        |saver, inputs| {
            let rows = inputs[0].f_reshape([-1, num_own])?;
            let rows = rows.f_to_kind(wide(rows.kind()))?;
            let (mut softmax, losses) = softmax_and_losses(group, rows, &own, &is_inside)?;
            let is_counted = is_counted.f_to_kind(losses.kind())?;
            // Backward of a position without a target begins with zeros.
            let softmax = softmax.f_mul_(&is_counted.f_unsqueeze(1)?)?;
            saver.save(&softmax);
            Ok(losses.f_mul(&is_counted)?.f_sum(losses.kind())?)
        },
        {
            let (shape, kind) = (logits.size(), logits.kind());
            let (own, is_inside) = (own.shallow_clone(), is_inside.shallow_clone());
            move |saved, gradients| {
                let ([softmax], [Some(gradient)]) = (saved, gradients) else {
                    return Ok(vec![None]);
                };
                let target = is_inside.f_to_kind(softmax.kind())?.f_mul(gradient)?;
                let mut d_logits = softmax.f_mul(gradient)?;
                let d_logits =
                    d_logits.f_scatter_add_(1, &own, &target.f_neg()?.f_unsqueeze(1)?)?;
                Ok(vec![Some(d_logits.f_view(&shape[..])?.f_to_kind(kind)?)])
            }
        },
    )?)
}

/// This rank's shard of the softmax over all classes, and the loss of every token.
fn softmax_and_losses(
    group: &Group,
    rows: Tensor,
    own: &Tensor,
    is_inside: &Tensor,
) -> Result<(Tensor, Tensor), TorchError> {
    let largest = rows.f_amax([1i64], true)?;
    let target = rows.f_gather(1, own, false)?;
    let target = target
        .f_squeeze_dim(1)?
        .f_mul(&is_inside.f_to_kind(rows.kind())?)?;
    let mut exponentials = rows.f_sub(&largest)?;
    // Free the logits before communicating: they are as large as everything else of the loss together.
    drop(rows);
    let mut exponentials = exponentials.f_exp_()?;
    let sum = exponentials.f_sum_dim_intlist([1i64].as_slice(), false, None::<Kind>)?;
    let largest = largest.f_squeeze_dim(1)?;

    let local = Tensor::f_stack(&[&largest, &sum, &target], 0)?;
    let (three, num_rows) = local.size2()?;
    let size = group.size() as i64;
    let all = meta::new_empty(&local, &[size, three, num_rows])?;
    group
        .on_caller()
        .all_gather(&all, &local, Purpose::Activation)?
        .wait()?;
    let each = |number: i64| all.f_select(1, number);

    let overall = each(0)?.f_amax([0i64], false)?;
    let scales = each(0)?.f_sub(&overall)?.f_exp()?;
    let total =
        each(1)?
            .f_mul(&scales)?
            .f_sum_dim_intlist([0i64].as_slice(), false, None::<Kind>)?;
    let target = each(2)?.f_sum_dim_intlist([0i64].as_slice(), false, None::<Kind>)?;
    let losses = total.f_log()?.f_add(&overall)?.f_sub(&target)?;
    let scale = largest.f_sub(&overall)?.f_exp()?.f_div(&total)?;
    let softmax = exponentials.f_mul_(&scale.f_unsqueeze(1)?)?;
    Ok((softmax, losses))
}

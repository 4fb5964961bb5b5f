//! A vocabulary of which every rank has an interval: looking rows up, and the loss.

use std::ops::Range;

use tch::{Kind, Tensor};
use trainyard_torch::{Group, TorchError, autograd, meta};
use trainyard_trace::Purpose;

use crate::Result;
use crate::loss::wide;
use crate::weight_gradients;

/// The rows of `table` for `tokens`.
pub(super) fn rows(table: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    weight_gradients::rows_of(table, tokens)
}

/// The same where `table` has the interval `own` of all rows; zero for tokens outside of it.
pub(super) fn own_rows(table: &Tensor, tokens: &Tensor, own: &Range<usize>) -> Result<Tensor> {
    let (own, is_outside) = within(tokens, own)?;
    Ok(rows(table, &own)?.f_masked_fill(&is_outside.f_unsqueeze(-1)?, 0.0)?)
}

/// Classes as this rank counts them, and which of them are not this rank's; those count as its first.
fn within(classes: &Tensor, own: &Range<usize>) -> Result<(Tensor, Tensor), TorchError> {
    let num_own = own.len() as i64;
    let own = classes.f_sub_scalar(own.start as i64)?;
    let is_outside = own.f_lt(0)?.f_bitwise_or_tensor(&own.f_ge(num_own)?)?;
    let own = own.f_masked_fill(&is_outside, 0)?;
    Ok((own, is_outside))
}

/// Cross entropy, summed over positions. Three numbers per position travel: a rank's largest logit,
/// its sum of exponentials, and the target's logit where it has it.
pub(super) fn cross_entropy_sum(
    group: &Group,
    logits: &Tensor,
    targets: &Tensor,
    own: &Range<usize>,
) -> Result<Tensor> {
    let num_own = own.len() as i64;
    let targets = targets.f_reshape(-1i64)?;
    let (own, is_outside) = within(&targets, own)?;
    let (own, is_inside) = (own.f_unsqueeze(1)?, is_outside.f_bitwise_not()?);
    Ok(autograd::single(
        &[logits],
        |saver, inputs| {
            let rows = inputs[0].f_reshape([-1, num_own])?;
            let rows = rows.f_to_kind(wide(rows.kind()))?;
            let (softmax, losses) = softmax_and_losses(group, rows, &own, &is_inside)?;
            saver.save(&softmax);
            Ok(losses.f_sum(losses.kind())?)
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

/// The softmax over all ranks' classes, as far as it is this rank's, and the loss of every position.
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
    // Logits are as large as all else of the loss together: gone before anything travels.
    drop(rows);
    let mut exponentials = exponentials.f_exp_()?;
    let sum = exponentials.f_sum_dim_intlist([1i64].as_slice(), false, None::<Kind>)?;
    let largest = largest.f_squeeze_dim(1)?;

    let mine = Tensor::f_stack(&[&largest, &sum, &target], 0)?;
    let (three, num_rows) = mine.size2()?;
    let size = group.size() as i64;
    let all = meta::new_empty(&mine, &[size, three, num_rows])?;
    group.all_gather(&all, &mine, Purpose::Activation)?.wait()?;
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

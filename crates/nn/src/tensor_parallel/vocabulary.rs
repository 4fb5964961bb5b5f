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

/// The targets of some tokens, relative to this rank's range of the vocabulary.
pub(super) struct OwnTargets {
    /// The class of each token within the range, as a column; 0 if it is outside.
    class: Tensor,
    is_inside: Tensor,
    is_counted: Tensor,
}

impl OwnTargets {
    /// Without a range, this rank has the whole vocabulary, and a target outside of it is an error.
    pub(super) fn new(
        targets: &Tensor,
        own: Option<&Range<usize>>,
    ) -> Result<OwnTargets, TorchError> {
        let targets = targets.f_reshape(-1i64)?;
        let is_counted = targets.f_ne(IGNORE_INDEX)?;
        let (class, is_inside) = match own {
            Some(own) => {
                let (class, is_outside) = within(&targets, own)?;
                (class, is_outside.f_bitwise_not()?)
            }
            None => {
                let class = targets.f_masked_fill(&is_counted.f_bitwise_not()?, 0)?;
                (class, is_counted.shallow_clone())
            }
        };
        Ok(OwnTargets {
            class: class.f_unsqueeze(1)?,
            is_inside,
            is_counted,
        })
    }

    /// Those of a range of the tokens.
    pub(super) fn narrow(&self, from: i64, length: i64) -> Result<OwnTargets, TorchError> {
        Ok(OwnTargets {
            class: self.class.f_narrow(0, from, length)?,
            is_inside: self.is_inside.f_narrow(0, from, length)?,
            is_counted: self.is_counted.f_narrow(0, from, length)?,
        })
    }
}

/// The summed cross entropy of the logits of all ranks.
pub(super) fn cross_entropy_sum(
    group: &Group,
    logits: &Tensor,
    targets: &OwnTargets,
) -> Result<Tensor> {
    let (shape, kind) = (logits.size(), logits.kind());
    Ok(autograd::apply(
        &[logits],
        |saver, inputs| {
            let rows = weight_gradients::flat(inputs[0])?;
            let (loss, d_logits) = loss_and_gradient(Some(group), rows, targets)?;
            saver.save(&d_logits);
            Ok(loss)
        },
        move |saved, gradients| {
            let ([d_logits], [Some(gradient)]) = (saved, gradients) else {
                return Ok(vec![None]);
            };
            let d_logits = d_logits.f_mul(gradient)?;
            Ok(vec![Some(d_logits.f_view(&shape[..])?.f_to_kind(kind)?)])
        },
    )?)
}

/// The summed loss of some tokens and the gradient of their `logits`, in at least fp32. Without a group this rank has all
/// logits.
pub(super) fn loss_and_gradient(
    group: Option<&Group>,
    logits: Tensor,
    targets: &OwnTargets,
) -> Result<(Tensor, Tensor), TorchError> {
    let kind = wide(logits.kind());
    let logits = logits.f_to_kind(kind)?;
    let (mut softmax, losses) = match group {
        Some(group) => sharded_softmax_and_losses(group, logits, targets)?,
        None => softmax_and_losses(logits, targets)?,
    };
    let is_counted = targets.is_counted.f_to_kind(kind)?;
    let loss = losses.f_mul(&is_counted)?.f_sum(kind)?;
    // The gradient of a token without a target is zero.
    let mut d_logits = softmax.f_mul_(&is_counted.f_unsqueeze(1)?)?;
    let minus_target = targets.is_inside.f_to_kind(kind)?.f_neg()?;
    let d_logits = d_logits.f_scatter_add_(1, &targets.class, &minus_target.f_unsqueeze(1)?)?;
    Ok((loss, d_logits))
}

/// The softmax of the logits of all classes, and the loss of every token.
fn softmax_and_losses(
    logits: Tensor,
    targets: &OwnTargets,
) -> Result<(Tensor, Tensor), TorchError> {
    let mut log_softmax = logits.f_log_softmax(-1, None::<Kind>)?;
    drop(logits);
    let losses = log_softmax.f_gather(1, &targets.class, false)?;
    Ok((log_softmax.f_exp_()?, losses.f_squeeze_dim(1)?.f_neg()?))
}

/// This rank's shard of the softmax over all classes, and the loss of every token. Ranks exchange three numbers per
/// token: the largest local logit, the local sum of exponentials, and the target's logit on the rank that has it.
fn sharded_softmax_and_losses(
    group: &Group,
    rows: Tensor,
    targets: &OwnTargets,
) -> Result<(Tensor, Tensor), TorchError> {
    let largest = rows.f_amax([1i64], true)?;
    let target = rows.f_gather(1, &targets.class, false)?;
    let target = target
        .f_squeeze_dim(1)?
        .f_mul(&targets.is_inside.f_to_kind(rows.kind())?)?;
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

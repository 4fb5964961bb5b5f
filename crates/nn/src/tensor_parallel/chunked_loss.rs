//! The loss of a language model from hidden states, some tokens at a time, so that its logits never exist as a whole.
//!
//! For each chunk of the tokens, forward computes the logits, their losses, and at once the gradients of the hidden
//! states and of the head's weight. After that the logits of the chunk are not needed again, and the next chunk reuses
//! their memory. Backward only multiplies these gradients by the gradient of the loss. This computes the same products as
//! a head and a loss of their own.

use tch::Tensor;
use trainyard_mesh::chunk;
use trainyard_torch::{Group, TorchError, autograd, meta};

use super::vocabulary::{OwnTargets, loss_and_gradient};
use crate::loss::wide;
use crate::recompute::is_recording;

/// The sum of losses, and its gradients.
struct Gradients {
    loss: Tensor,
    d_hidden: Option<Tensor>,
    d_weight: Option<Tensor>,
}

/// The summed cross entropy of `hidden` [tokens, width] projected by `weight`, which has a range of the vocabulary if
/// there is a group.
pub(super) fn cross_entropy_sum(
    group: Option<&Group>,
    hidden: &Tensor,
    weight: &Tensor,
    targets: &OwnTargets,
    num_chunks: usize,
) -> Result<Tensor, TorchError> {
    let needs = [is_recording(hidden)?, is_recording(weight)?];
    let (shape, kind) = (hidden.size(), weight.kind());
    let Gradients {
        loss,
        mut d_hidden,
        mut d_weight,
    } = tch::no_grad(|| by_chunks(group, hidden, weight, targets, num_chunks, needs))?;
    let mut is_first = true;
    autograd::apply(
        &[hidden, weight],
        |_, _| Ok(loss),
        move |_, gradients| {
            let [Some(gradient)] = gradients else {
                return Ok(vec![None, None]);
            };
            if !std::mem::replace(&mut is_first, false) {
                return Err(TorchError::Invalid(
                    "backward of a chunked loss can run only once: run forward again".to_owned(),
                ));
            }
            let times = |own: Option<Tensor>| own.map(|mut own| own.f_mul_(gradient)).transpose();
            let d_hidden = times(d_hidden.take())?.map(|own| own.f_view(&shape[..]));
            let d_weight = times(d_weight.take())?.map(|own| own.f_to_kind(kind));
            Ok(vec![d_hidden.transpose()?, d_weight.transpose()?])
        },
    )
}

fn by_chunks(
    group: Option<&Group>,
    hidden: &Tensor,
    weight: &Tensor,
    targets: &OwnTargets,
    num_chunks: usize,
    [needs_hidden, needs_weight]: [bool; 2],
) -> Result<Gradients, TorchError> {
    let (_, width) = weight.size2()?;
    let hidden = hidden.f_reshape([-1, width])?;
    let (num_tokens, _) = hidden.size2()?;
    let d_hidden = needs_hidden
        .then(|| meta::new_empty(&hidden, &[num_tokens, width]))
        .transpose()?;
    let (mut total, mut d_weight): (Option<Tensor>, Option<Tensor>) = (None, None);
    for index in 0..num_chunks {
        let range = chunk(num_tokens as usize, num_chunks, index);
        if range.is_empty() {
            break;
        }
        let (from, length) = (range.start as i64, range.len() as i64);
        let own = hidden.f_narrow(0, from, length)?;
        let logits = own.f_linear(weight, None::<&Tensor>)?;
        let (loss, d_logits) = loss_and_gradient(group, logits, &targets.narrow(from, length)?)?;
        let d_logits = d_logits.f_to_kind(weight.kind())?;
        if let Some(d_hidden) = &d_hidden {
            let _ = d_logits.f_mm_out(&d_hidden.f_narrow(0, from, length)?, weight)?;
        }
        if needs_weight {
            d_weight = Some(plus_product(d_weight, &d_logits.f_transpose(0, 1)?, &own)?);
        }
        total = Some(match total {
            Some(mut total) => total.f_add_(&loss)?,
            None => loss,
        });
    }
    let no_tokens = || TorchError::Invalid("the loss of a batch without tokens".to_owned());
    Ok(Gradients {
        loss: total.ok_or_else(no_tokens)?,
        d_hidden,
        d_weight,
    })
}

/// Adds a product to a sum that has at least fp32.
fn plus_product(sum: Option<Tensor>, rows: &Tensor, own: &Tensor) -> Result<Tensor, TorchError> {
    let kind = wide(own.kind());
    Ok(match sum {
        None => rows.f_mm(own)?.f_to_kind(kind)?,
        Some(mut sum) if kind == own.kind() => sum.f_addmm_(rows, own)?,
        Some(mut sum) => sum.f_add_(&rows.f_mm(own)?)?,
    })
}

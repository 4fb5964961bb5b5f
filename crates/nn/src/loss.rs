//! Cross-entropy loss.

use tch::{Kind, Reduction, Tensor};
use trainyard_torch::IGNORE_INDEX;

use crate::Result;

/// The summed cross entropy of `logits` [.., classes] and `targets` [..] except [`IGNORE_INDEX`], in at least fp32.
pub fn cross_entropy_sum(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let kind = wide(logits.f_kind()?);
    let num_classes = logits.size().last().copied().unwrap_or(1);
    Ok(logits
        .f_reshape([-1, num_classes])?
        .f_to_kind(kind)?
        .f_cross_entropy_loss(
            &targets.f_reshape(-1i64)?,
            None::<&Tensor>,
            Reduction::Sum,
            IGNORE_INDEX,
            0.0,
        )?)
}

/// The dtype for accumulating values of `kind`: losses, squares, attention.
pub(crate) fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        kind => kind,
    }
}

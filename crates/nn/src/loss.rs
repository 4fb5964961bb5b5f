//! Cross entropy as every classifying model here uses it.

use tch::{Kind, Reduction, Tensor};

use crate::Result;

/// Cross entropy of `logits` [.., classes] against `targets` [..], summed, in single precision at
/// least.
pub fn cross_entropy_sum(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    const NO_IGNORED_CLASS: i64 = -100;
    let kind = wide(logits.f_kind()?);
    let num_classes = logits.size().last().copied().unwrap_or(1);
    Ok(logits
        .f_reshape([-1, num_classes])?
        .f_to_kind(kind)?
        .f_cross_entropy_loss(
            &targets.f_reshape(-1i64)?,
            None::<&Tensor>,
            Reduction::Sum,
            NO_IGNORED_CLASS,
            0.0,
        )?)
}

/// The kind in which numbers of `kind` are added up: losses, squares, shares of attention.
pub(crate) fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        kind => kind,
    }
}

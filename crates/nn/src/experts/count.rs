//! Counting ids without a host synchronization.

use tch::{Kind, Tensor};

use crate::Result;

/// How often each id occurs in `ids`, a flat int64 tensor of ids below `number`.
///
/// On a GPU, `bincount` waits for the device to learn the largest id. Sums of integers do not depend on their order, so
/// adding by index gives the same counts.
pub(super) fn count(ids: &Tensor, number: i64) -> Result<Tensor> {
    if !ids.device().is_cuda() {
        return Ok(ids.f_bincount(None::<&Tensor>, number)?);
    }
    let zeros = Tensor::f_zeros(number, (Kind::Int64, ids.device()))?;
    Ok(zeros.f_scatter_add(0, ids, &ids.f_ones_like()?)?)
}

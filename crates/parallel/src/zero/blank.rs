//! New rows, on the device of an old tensor, meta included.

use tch::{Kind, Tensor};
use trainyard_torch::{Result, meta, storage};

/// A row of zeros.
pub(super) fn blank(like: &Tensor, length: usize, kind: Kind) -> Result<Tensor> {
    tch::no_grad(|| {
        let none = like.f_view(-1i64)?.f_narrow(0, 0, 0)?.f_to_kind(kind)?;
        meta::new_zeros(&none, &[length as i64])
    })
}

/// A row with a shape and a type, but no memory behind it yet.
pub(super) fn shell(like: &Tensor, length: usize, kind: Kind) -> Result<Tensor> {
    let row = blank(like, length, kind)?;
    storage::release(&row)?;
    Ok(row)
}

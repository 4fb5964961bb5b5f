//! New one-dimensional tensors on the device of another tensor, the meta device included.

use tch::{Kind, Tensor};
use trainyard_torch::{Result, meta, storage};

/// A flat tensor of zeros.
pub(super) fn zeros_flat(like: &Tensor, length: usize, kind: Kind) -> Result<Tensor> {
    tch::no_grad(|| {
        let none = like.f_view(-1i64)?.f_narrow(0, 0, 0)?.f_to_kind(kind)?;
        meta::new_zeros(&none, &[length as i64])
    })
}

/// A flat tensor with a shape and a type, but no storage yet.
pub(super) fn without_storage(like: &Tensor, length: usize, kind: Kind) -> Result<Tensor> {
    let flat = zeros_flat(like, length, kind)?;
    storage::release(&flat)?;
    Ok(flat)
}

//! One-dimensional tensors on the device of another tensor, the meta device included, and views of them.

use std::ops::Range;

use tch::{Kind, Tensor};
use trainyard_torch::{Result, meta, storage};

/// A flat tensor of zeros.
pub(crate) fn zeros_flat(like: &Tensor, length: usize, kind: Kind) -> Result<Tensor> {
    meta::new_zeros(&empty_flat(like, kind)?, &[length as i64])
}

/// A flat tensor with a shape and a type, but no storage yet.
pub(crate) fn without_storage(like: &Tensor, length: usize, kind: Kind) -> Result<Tensor> {
    storage::new_released(&empty_flat(like, kind)?, &[length as i64])
}

/// An interval of a flat tensor, in the shape of `like`.
pub(crate) fn view_as(flat: &Tensor, interval: Range<usize>, like: &Tensor) -> Result<Tensor> {
    let flat = flat.f_narrow(0, interval.start as i64, interval.len() as i64)?;
    Ok(flat.f_view(&like.size()[..])?)
}

/// A flat tensor without elements.
fn empty_flat(like: &Tensor, kind: Kind) -> Result<Tensor> {
    Ok(tch::no_grad(|| {
        like.f_view(-1i64)?.f_narrow(0, 0, 0)?.f_to_kind(kind)
    })?)
}

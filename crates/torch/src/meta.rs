//! Tensors without memory, for dry runs: shapes, types and autograd, but no numbers.
//!
//! `tch` has no name for the meta device (it reports `Mps`), so code that is to run on meta makes
//! new tensors from old ones (`zeros_like`, [`new_zeros`], [`new_empty`]) and never from a `Device`.

use tch::{Kind, Tensor};

use crate::border::{borrow, owned};
use crate::bridge::ffi;
use crate::error::{Result, TorchError};

/// A tensor on the meta device.
pub fn empty(shape: &[i64], kind: Kind) -> Result<Tensor> {
    ffi::register_meta_kernels()?;
    Ok(owned(ffi::empty_meta(shape, scalar_type(kind)?)?))
}

/// Undefined elements in another shape, with the type and on the device of `like`, meta included.
pub fn new_empty(like: &Tensor, shape: &[i64]) -> Result<Tensor> {
    Ok(owned(ffi::new_empty(borrow(like), shape)?))
}

/// Zeros of another shape, with the type and on the device of `like`, meta included.
pub fn new_zeros(like: &Tensor, shape: &[i64]) -> Result<Tensor> {
    Ok(owned(ffi::new_zeros(borrow(like), shape)?))
}

/// Whether a tensor is on the meta device.
pub fn is_meta(tensor: &Tensor) -> bool {
    ffi::is_meta(borrow(tensor))
}

/// libtorch's number of a type.
fn scalar_type(kind: Kind) -> Result<i32> {
    Ok(match kind {
        Kind::Uint8 => 0,
        Kind::Int8 => 1,
        Kind::Int16 => 2,
        Kind::Int => 3,
        Kind::Int64 => 4,
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::Bool => 11,
        Kind::BFloat16 => 15,
        other => {
            return Err(TorchError::Invalid(format!(
                "no meta tensors of type {other:?}: use a floating or integer type"
            )));
        }
    })
}

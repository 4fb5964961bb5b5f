//! Meta tensors, for dry runs: they have shapes, types and autograd, but no memory and no values.
//!
//! `tch::Device` has no meta device (`tch` reports `Mps`), so code that must run on meta creates tensors from
//! existing ones (`zeros_like`, [`new_zeros`], [`new_empty`]) and never from a `tch::Device`.

use tch::{Kind, Tensor};

use crate::bridge::ffi;
use crate::error::{Result, TorchError};
use crate::ffi_tensor::{borrow, owned};

/// Chooses whose kernels meta tensors simulate in this process, where kernels of GPUs and CPUs allocate differently.
pub fn simulate_gpu(is_on_gpu: bool) {
    ffi::simulate_gpu(is_on_gpu);
}

/// A new tensor on the meta device.
pub fn empty(shape: &[i64], kind: Kind) -> Result<Tensor> {
    ffi::register_meta_kernels()?;
    Ok(owned(ffi::empty_meta(shape, scalar_type(kind)?)?))
}

/// An uninitialized tensor of another shape with the type and device of `like`, which may be meta.
pub fn new_empty(like: &Tensor, shape: &[i64]) -> Result<Tensor> {
    Ok(owned(ffi::new_empty(borrow(like), shape)?))
}

/// A tensor of zeros of another shape with the type and device of `like`, which may be meta.
pub fn new_zeros(like: &Tensor, shape: &[i64]) -> Result<Tensor> {
    Ok(owned(ffi::new_zeros(borrow(like), shape)?))
}

/// Whether a tensor is on the meta device.
pub fn is_meta(tensor: &Tensor) -> bool {
    ffi::is_meta(borrow(tensor))
}

/// The `c10::ScalarType` of a kind.
pub(crate) fn scalar_type(kind: Kind) -> Result<i32> {
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
                "meta tensors of type {other:?} are not supported: use a floating-point or integer type"
            )));
        }
    })
}

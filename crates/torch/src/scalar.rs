//! A scalar on the device of another tensor. `tch` has no name for the meta device, so the scalar is
//! computed from the tensor itself; the host copies nothing.

use tch::{Kind, Tensor};

use crate::Result;

/// A float32 zero on the device of `tensor`: the sum over none of its elements.
pub fn zero_like(tensor: &Tensor) -> Result<Tensor> {
    let none = tensor.f_reshape([-1i64])?.f_narrow(0, 0, 0)?;
    Ok(none.f_sum(Kind::Float)?)
}

/// A float32 scalar on the device of `tensor`.
pub fn like(tensor: &Tensor, value: f64) -> Result<Tensor> {
    Ok(zero_like(tensor)?.f_add_scalar(value)?)
}

/// A float64 scalar on the device of `tensor`.
pub fn double_like(tensor: &Tensor, value: f64) -> Result<Tensor> {
    let zero = zero_like(tensor)?.f_to_kind(Kind::Double)?;
    Ok(zero.f_add_scalar(value)?)
}

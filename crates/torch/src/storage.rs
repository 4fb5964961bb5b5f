//! The memory behind a tensor: given back and taken again while the tensor itself stays.

use tch::Tensor;

use crate::border::borrow;
use crate::bridge::ffi;
use crate::error::Result;

/// Gives the memory back. Shape and type stay; reading the tensor before [`restore`] is an error of
/// the caller's that libtorch does not catch.
pub fn release(tensor: &Tensor) -> Result<()> {
    Ok(ffi::release_storage(borrow(tensor))?)
}

/// Takes memory again, with undefined contents.
pub fn restore(tensor: &Tensor) -> Result<()> {
    Ok(ffi::restore_storage(borrow(tensor))?)
}

/// The memory behind `a` goes to `b` and that behind `b` to `a`; shapes and types stay. The caller
/// sees to it that each is large enough for the other.
pub fn exchange(a: &Tensor, b: &Tensor) -> Result<()> {
    Ok(ffi::exchange_storages(borrow(a), borrow(b))?)
}

/// A number that grows whenever the values of `tensor`, or of a view of it, change in place.
pub fn version(tensor: &Tensor) -> Result<i64> {
    Ok(ffi::version(borrow(tensor))?)
}

/// Makes `tensor` stand on the memory, shape and strides of `data`, keeping its place in autograd.
pub fn rebind(tensor: &Tensor, data: &Tensor) -> Result<()> {
    Ok(ffi::rebind(borrow(tensor), borrow(data))?)
}

/// Bytes of the storage behind a tensor, which views share.
pub fn bytes(tensor: &Tensor) -> Result<usize> {
    Ok(ffi::storage_bytes(borrow(tensor))?)
}

/// Whether two tensors stand on the same storage.
pub fn is_shared(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(ffi::storage_address(borrow(a))? == ffi::storage_address(borrow(b))?)
}

//! Releases and restores the memory behind a tensor while the tensor itself stays.

use tch::Tensor;

use crate::bridge::ffi;
use crate::error::Result;
use crate::ffi_tensor::{borrow, owned};

/// Frees the memory of a tensor, which keeps its shape and type. The caller must not read it before [`restore`];
/// libtorch does not check that.
pub fn release(tensor: &Tensor) -> Result<()> {
    Ok(ffi::release_storage(borrow(tensor))?)
}

/// Allocates the memory of a released tensor again, with undefined contents.
pub fn restore(tensor: &Tensor) -> Result<()> {
    Ok(ffi::restore_storage(borrow(tensor))?)
}

/// A tensor on the device and of the type of `like`, as after [`release`]: with a shape, but without memory.
pub fn new_released(like: &Tensor, shape: &[i64]) -> Result<Tensor> {
    Ok(owned(ffi::new_without_storage(borrow(like), shape)?))
}

/// Swaps the memory of two tensors; shapes and types stay. The caller must ensure that each memory is large enough
/// for the other tensor.
pub fn swap(a: &Tensor, b: &Tensor) -> Result<()> {
    Ok(ffi::swap_storages(borrow(a), borrow(b))?)
}

/// The version counter of `tensor`, which grows whenever its values, or those of a view of it, change in place.
pub fn version(tensor: &Tensor) -> Result<i64> {
    Ok(ffi::version(borrow(tensor))?)
}

/// Makes `tensor` use the memory, shape and strides of `data`. Its autograd state stays, as with PyTorch's
/// `tensor.data = data`.
pub fn rebind(tensor: &Tensor, data: &Tensor) -> Result<()> {
    Ok(ffi::rebind(borrow(tensor), borrow(data))?)
}

/// The size in bytes of the storage behind a tensor, which views share.
pub fn bytes(tensor: &Tensor) -> Result<usize> {
    Ok(ffi::storage_bytes(borrow(tensor))?)
}

/// Whether two tensors share a storage.
pub fn is_shared(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(ffi::storage_address(borrow(a))? == ffi::storage_address(borrow(b))?)
}

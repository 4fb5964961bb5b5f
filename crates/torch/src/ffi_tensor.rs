//! Conversions of tensors between `tch` and C++; both hold a pointer to an `at::Tensor`.

use cxx::UniquePtr;
use tch::Tensor;

use crate::bridge::ffi::{self, AtTensor, TensorList};
use crate::error::Result;

/// A tensor of `tch` as a C++ reference.
pub(crate) fn borrow(tensor: &Tensor) -> &AtTensor {
    // SAFETY: tch's pointer is an `at::Tensor*` that lives as long as the borrow.
    unsafe { &*tensor.as_ptr().cast::<AtTensor>() }
}

/// A new `tch` handle to the tensor behind a C++ reference.
pub(crate) fn shared(tensor: &AtTensor) -> Tensor {
    owned(ffi::share(tensor))
}

/// Takes ownership of a tensor that C++ returned, which is never null.
pub(crate) fn owned(tensor: UniquePtr<AtTensor>) -> Tensor {
    // SAFETY: tch frees with `delete` what C++ allocated with `new`; ownership moves exactly once.
    unsafe { Tensor::from_ptr(tensor.into_raw().cast()) }
}

/// A tensor of `tch` as an owned C++ tensor.
pub(crate) fn unique(tensor: Tensor) -> UniquePtr<AtTensor> {
    ffi::share(borrow(&tensor))
}

/// The tensor at an address that C++ passed to a callback; address 0 is an undefined tensor.
pub(crate) fn optional(address: usize) -> Option<Tensor> {
    if address == 0 {
        return None;
    }
    // SAFETY: C++ passes addresses of tensors on its stack, alive until the callback returns.
    Some(shared(unsafe { &*(address as *const AtTensor) }))
}

/// The addresses of tensors, as C++ functions take a list.
pub(crate) fn addresses<T: std::borrow::Borrow<Tensor>>(tensors: &[T]) -> Vec<usize> {
    tensors
        .iter()
        .map(|t| t.borrow().as_ptr() as usize)
        .collect()
}

/// The tensors of a list that C++ returned.
pub(crate) fn unpacked(mut list: UniquePtr<TensorList>) -> Result<Vec<Tensor>> {
    let num_tensors = list.as_ref().map_or(0, TensorList::len);
    let mut out = Vec::with_capacity(num_tensors);
    for index in 0..num_tensors {
        out.push(owned(list.pin_mut().take(index)?));
    }
    Ok(out)
}

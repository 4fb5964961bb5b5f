//! Tensors on their way across the border. `tch` holds a pointer to an `at::Tensor`; so does C++.

use cxx::UniquePtr;
use tch::Tensor;

use crate::bridge::ffi::{self, AtTensor, TensorList};
use crate::error::Result;

/// C++'s view of a tensor.
pub(crate) fn borrow(tensor: &Tensor) -> &AtTensor {
    // SAFETY: tch's pointer is an `at::Tensor*` that lives as long as the borrow.
    unsafe { &*tensor.as_ptr().cast::<AtTensor>() }
}

/// A tensor of our own that shares C++'s.
pub(crate) fn shared(tensor: &AtTensor) -> Tensor {
    owned(ffi::share(tensor))
}

/// Takes over a tensor that C++ made. C++ never hands out a null here.
pub(crate) fn owned(tensor: UniquePtr<AtTensor>) -> Tensor {
    // SAFETY: tch frees with `delete` what C++ allocated with `new`; the pointer changes hands once.
    unsafe { Tensor::from_ptr(tensor.into_raw().cast()) }
}

/// Gives a tensor to C++.
pub(crate) fn unique(tensor: Tensor) -> UniquePtr<AtTensor> {
    ffi::share(borrow(&tensor))
}

/// The tensor at an address C++ passed for the length of a call; 0 stands for none.
pub(crate) fn optional(address: usize) -> Option<Tensor> {
    if address == 0 {
        return None;
    }
    // SAFETY: C++ passes addresses of tensors on its stack, alive until the callback returns.
    Some(shared(unsafe { &*(address as *const AtTensor) }))
}

/// Addresses of tensors for a call that takes a list.
pub(crate) fn addresses<T: std::borrow::Borrow<Tensor>>(tensors: &[T]) -> Vec<usize> {
    tensors
        .iter()
        .map(|t| t.borrow().as_ptr() as usize)
        .collect()
}

/// All tensors of a list that C++ made.
pub(crate) fn unpacked(mut list: UniquePtr<TensorList>) -> Result<Vec<Tensor>> {
    let num_tensors = list.as_ref().map_or(0, TensorList::len);
    let mut out = Vec::with_capacity(num_tensors);
    for index in 0..num_tensors {
        out.push(owned(list.pin_mut().take(index)?));
    }
    Ok(out)
}

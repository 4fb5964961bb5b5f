//! Saved-tensor hooks: intercept the tensors that autograd saves for backward, to offload or recompute them.

use tch::Tensor;

use crate::bridge::{SavedHooks, ffi};
use crate::error::Result;

/// Packs tensors that autograd saves and unpacks them for backward, like PyTorch's `saved_tensors_hooks`.
pub trait SavedTensorHooks: Send {
    /// Autograd saves a tensor: store it, or what is needed to recreate it, and return an id.
    fn pack(&self, tensor: Tensor) -> Result<u64>;
    /// Backward needs the tensor.
    fn unpack(&self, id: u64) -> Result<Tensor>;
    /// The graph no longer needs the tensor.
    fn release(&self, id: u64);
}

/// Runs `body` with `hooks` applied to every tensor that autograd saves on this thread.
pub fn with_hooks<T>(
    hooks: impl SavedTensorHooks + 'static,
    body: impl FnOnce() -> T,
) -> Result<T> {
    struct Pop;
    impl Drop for Pop {
        fn drop(&mut self) {
            ffi::pop_saved_hooks();
        }
    }
    ffi::push_saved_hooks(Box::new(SavedHooks(Box::new(hooks))))?;
    let _pop = Pop;
    Ok(body())
}

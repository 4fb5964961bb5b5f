//! What happens to the tensors that autograd saves for backward: kept elsewhere, or made again.

use tch::Tensor;

use crate::bridge::{SavedHooks, ffi};
use crate::error::Result;

/// Takes saved tensors away and brings them back.
pub trait Keeper: Send {
    /// A tensor is being saved: keep it, or whatever brings it back, under a ticket.
    fn pack(&self, tensor: Tensor) -> Result<u64>;
    /// Backward needs it.
    fn unpack(&self, ticket: u64) -> Result<Tensor>;
    /// The graph no longer needs it.
    fn forget(&self, ticket: u64);
}

/// Runs `body`; what autograd saves meanwhile on this thread goes to `keeper`.
pub fn saving_with<T>(keeper: impl Keeper + 'static, body: impl FnOnce() -> T) -> Result<T> {
    struct Pop;
    impl Drop for Pop {
        fn drop(&mut self) {
            ffi::pop_saved_hooks();
        }
    }
    ffi::push_saved_hooks(Box::new(SavedHooks(Box::new(keeper))))?;
    let _pop = Pop;
    Ok(body())
}

//! Hooks on gradients, and functions whose forward and backward are Rust closures.

use std::sync::Mutex;

use cxx::UniquePtr;
use tch::Tensor;

use crate::border::{addresses, borrow, unpacked};
use crate::bridge::{Backward, LeafHook, TensorHook, ffi};
use crate::error::{Result, TorchError};

/// Keeps a hook in place; the hook is removed when this is dropped.
#[must_use = "the hook is removed as soon as its handle is dropped"]
pub struct HookHandle(UniquePtr<ffi::HookHandle>);

impl Drop for HookHandle {
    fn drop(&mut self) {
        if let Some(handle) = self.0.as_mut() {
            // A hook that is already gone needs no removing.
            let _ = ffi::remove_hook(handle);
        }
    }
}

/// Calls `hook` with the leaf each time a gradient has been accumulated into it.
///
/// It runs on the thread that runs backward, as soon as this gradient is complete and while others
/// are still being computed. An error it returns ends backward with that error.
pub fn post_accumulate_hook(
    leaf: &Tensor,
    hook: impl FnMut(&Tensor) -> Result<()> + Send + 'static,
) -> Result<HookHandle> {
    let hook = Box::new(LeafHook(Mutex::new(Box::new(hook))));
    Ok(HookHandle(ffi::add_leaf_hook(borrow(leaf), hook)?))
}

/// Calls `hook` with the gradient of `tensor` before it flows on; what it returns takes its place.
pub fn tensor_hook(
    tensor: &Tensor,
    hook: impl FnMut(&Tensor) -> Result<Option<Tensor>> + Send + 'static,
) -> Result<HookHandle> {
    let hook = Box::new(TensorHook(Mutex::new(Box::new(hook))));
    Ok(HookHandle(ffi::add_tensor_hook(borrow(tensor), hook)?))
}

/// Collects what a custom function's forward wants to see again in backward.
#[derive(Default)]
pub struct Saver(Vec<Tensor>);

impl Saver {
    /// Saves an input, an output or anything between. In-place changes made to it later are
    /// detected, and saved-tensor hooks see it.
    pub fn save(&mut self, tensor: &Tensor) {
        self.0.push(tensor.shallow_clone());
    }
}

/// Applies a function with a backward of its own.
///
/// `forward` runs without autograd on the inputs. `backward` gets the saved tensors in the order
/// they were saved and the gradient of each output, and returns one gradient per input. It is
/// dropped together with everything it captured when the graph is released.
pub fn function(
    inputs: &[&Tensor],
    forward: impl FnOnce(&mut Saver, &[&Tensor]) -> Result<Vec<Tensor>>,
    backward: impl FnMut(&[Tensor], &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> + Send + 'static,
) -> Result<Vec<Tensor>> {
    let mut saver = Saver::default();
    let outputs = tch::no_grad(|| forward(&mut saver, inputs))?;
    let list = ffi::attach_backward(
        &addresses(inputs),
        &addresses(&outputs),
        &addresses(&saver.0),
        Box::new(Backward(Mutex::new(Some(Box::new(backward))))),
    )?;
    unpacked(list)
}

/// The same for a function of one output.
pub fn single(
    inputs: &[&Tensor],
    forward: impl FnOnce(&mut Saver, &[&Tensor]) -> Result<Tensor>,
    backward: impl FnMut(&[Tensor], &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> + Send + 'static,
) -> Result<Tensor> {
    let forward = |saver: &mut Saver, inputs: &[&Tensor]| Ok(vec![forward(saver, inputs)?]);
    let outputs = function(inputs, forward, backward)?;
    let missing = || TorchError::Invalid("a function without an output".to_owned());
    outputs.into_iter().next().ok_or_else(missing)
}

/// Runs backward from tensors whose gradients are known; may be called within a function's backward.
pub fn backward(tensors: &[&Tensor], gradients: &[&Tensor]) -> Result<()> {
    Ok(ffi::backward(&addresses(tensors), &addresses(gradients))?)
}

/// Makes `grad` the gradient of `leaf`.
pub fn set_grad(leaf: &Tensor, grad: &Tensor) -> Result<()> {
    Ok(ffi::set_grad(borrow(leaf), borrow(grad))?)
}

/// Leaves `leaf` without a gradient (undefined, not zero).
pub fn clear_grad(leaf: &Tensor) -> Result<()> {
    Ok(ffi::clear_grad(borrow(leaf))?)
}

/// Notes that the values of `tensor` changed, so that a backward that saved them complains.
///
/// For what libtorch does not count as a change: a collective into a tensor's memory.
pub fn mark_changed(tensor: &Tensor) -> Result<()> {
    let version = ffi::version(borrow(tensor))?;
    Ok(ffi::set_version(borrow(tensor), version + 1)?)
}

/// Runs `change` on a tensor without autograd noticing that its values changed.
///
/// For putting back the very values that autograd saved, as when a released parameter is gathered
/// again: the version counter is restored, so that backward does not complain.
pub fn unnoticed<T>(tensor: &Tensor, change: impl FnOnce() -> T) -> Result<T> {
    let version = ffi::version(borrow(tensor))?;
    let out = tch::no_grad(change);
    ffi::set_version(borrow(tensor), version)?;
    Ok(out)
}

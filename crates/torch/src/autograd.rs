//! Gradient hooks, and custom autograd functions whose forward and backward are Rust closures.

use std::sync::Mutex;

use cxx::UniquePtr;
use tch::Tensor;

use crate::bridge::{Backward, LeafHook, TensorHook, ffi};
use crate::error::{Result, TorchError};
use crate::ffi_tensor::{addresses, borrow, unpacked};

/// The handle of a registered hook; dropping it removes the hook.
#[must_use = "the hook is removed as soon as its handle is dropped"]
pub struct HookHandle(UniquePtr<ffi::HookHandle>);

impl Drop for HookHandle {
    fn drop(&mut self) {
        if let Some(handle) = self.0.as_mut() {
            // The only failure is that the hook is gone already.
            let _ = ffi::remove_hook(handle);
        }
    }
}

/// Calls `hook` with the leaf each time a gradient has been accumulated into it, like PyTorch's
/// `register_post_accumulate_grad_hook`.
///
/// The hook runs on the thread that runs backward, as soon as this gradient is complete and while others are still
/// being computed. An error that it returns aborts backward.
pub fn post_accumulate_hook(
    leaf: &Tensor,
    hook: impl FnMut(&Tensor) -> Result<()> + Send + 'static,
) -> Result<HookHandle> {
    let hook = Box::new(LeafHook(Mutex::new(Box::new(hook))));
    Ok(HookHandle(ffi::add_leaf_hook(borrow(leaf), hook)?))
}

/// Calls `hook` with the gradient of `tensor` before it propagates further; a returned tensor replaces the gradient.
pub fn tensor_hook(
    tensor: &Tensor,
    hook: impl FnMut(&Tensor) -> Result<Option<Tensor>> + Send + 'static,
) -> Result<HookHandle> {
    let hook = Box::new(TensorHook(Mutex::new(Box::new(hook))));
    Ok(HookHandle(ffi::add_tensor_hook(borrow(tensor), hook)?))
}

/// Collects the tensors that the forward of a custom function saves for its backward.
#[derive(Default)]
pub struct Saver(Vec<Tensor>);

impl Saver {
    /// Saves an input, an output or an intermediate tensor. Backward detects later in-place changes to it, and
    /// saved-tensor hooks apply.
    pub fn save(&mut self, tensor: &Tensor) {
        self.0.push(tensor.shallow_clone());
    }
}

/// Applies a custom autograd function with several outputs, like PyTorch's `torch.autograd.Function.apply`.
///
/// `forward` runs on the inputs with autograd disabled. `backward` receives the saved tensors in the order in which
/// they were saved and the gradient of each output, and returns one gradient per input. Releasing the graph drops
/// `backward` with everything that it captured.
pub fn apply_multi_output(
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

/// Applies a custom autograd function with one output; see [`apply_multi_output`].
pub fn apply(
    inputs: &[&Tensor],
    forward: impl FnOnce(&mut Saver, &[&Tensor]) -> Result<Tensor>,
    backward: impl FnMut(&[Tensor], &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> + Send + 'static,
) -> Result<Tensor> {
    let forward = |saver: &mut Saver, inputs: &[&Tensor]| Ok(vec![forward(saver, inputs)?]);
    let outputs = apply_multi_output(inputs, forward, backward)?;
    let missing =
        || TorchError::Invalid("a custom autograd function returned no output".to_owned());
    outputs.into_iter().next().ok_or_else(missing)
}

/// Runs backward from tensors with the given gradients. May be called within the backward of a custom function.
pub fn backward(tensors: &[&Tensor], gradients: &[&Tensor]) -> Result<()> {
    Ok(ffi::backward(&addresses(tensors), &addresses(gradients))?)
}

/// Makes every backward that this thread starts from now on run on this thread, like PyTorch's
/// `torch.autograd.set_multithreading_enabled(False)`. Otherwise libtorch runs the backward of a device on a thread of
/// its own, which hooks with thread-bound state cannot use.
pub fn run_backward_on_calling_thread() {
    ffi::run_backward_on_calling_thread();
}

/// Sets the gradient of `leaf` to `grad`.
pub fn set_grad(leaf: &Tensor, grad: &Tensor) -> Result<()> {
    Ok(ffi::set_grad(borrow(leaf), borrow(grad))?)
}

/// Removes the gradient of `leaf`: it becomes undefined, not zero.
pub fn clear_grad(leaf: &Tensor) -> Result<()> {
    Ok(ffi::clear_grad(borrow(leaf))?)
}

/// Increments the version counter of `tensor`, so that a backward that saved its old values fails.
///
/// For changes that libtorch does not count, such as a collective that writes into the tensor.
pub fn increment_version(tensor: &Tensor) -> Result<()> {
    let version = ffi::version(borrow(tensor))?;
    Ok(ffi::set_version(borrow(tensor), version + 1)?)
}

/// Runs `change` on a tensor and restores its version counter, so that backward accepts the change.
///
/// For writing back the same values that autograd saved, as when a released parameter is gathered again.
pub fn without_version_bump<T>(tensor: &Tensor, change: impl FnOnce() -> T) -> Result<T> {
    let version = ffi::version(borrow(tensor))?;
    let out = tch::no_grad(change);
    ffi::set_version(borrow(tensor), version)?;
    Ok(out)
}

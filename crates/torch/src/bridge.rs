//! The FFI to C++: the declarations of `cpp/bridge.h`, and the callbacks that C++ makes into Rust.
//!
//! Only this module calls C++. A call that can throw returns a `Result`, and every callback turns a panic into an
//! error, so that neither side unwinds into the other.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use tch::Tensor;

use crate::error::{Result, TorchError};
use crate::ffi_tensor::{borrow, optional, shared, unique};

#[allow(clippy::too_many_arguments)]
#[cxx::bridge(namespace = "trainyard")]
pub(crate) mod ffi {
    /// One allocation (positive `bytes`) or release (negative).
    struct AllocationRecord {
        time_ns: u64,
        bytes: i64,
        kind: u8,
    }

    /// One executed operator; `shapes` encodes each input tensor as its number of dims followed by the dims. A view
    /// has no bytes. `output_shape` is the shape of the first output.
    struct OperatorRecord {
        name: String,
        shapes: Vec<i64>,
        output_shape: Vec<i64>,
        input_bytes: u64,
        output_bytes: u64,
        started_ns: u64,
        ended_ns: u64,
        thread: u64,
    }

    /// A stream of a device, as libtorch identifies it.
    #[derive(Clone, Copy)]
    struct StreamId {
        id: i64,
        device: i32,
    }

    extern "Rust" {
        type LeafHook;
        fn run_leaf_hook(hook: &LeafHook, leaf: &AtTensor) -> Result<()>;
        type TensorHook;
        fn run_tensor_hook(hook: &TensorHook, grad: &AtTensor) -> Result<UniquePtr<AtTensor>>;
        type Backward;
        fn run_backward(
            backward: &Backward,
            saved: &[usize],
            grads: &[usize],
            out: Pin<&mut TensorList>,
        ) -> Result<()>;
        fn release_backward(backward: &Backward);
        type SavedHooks;
        fn pack_saved(hooks: &SavedHooks, tensor: &AtTensor) -> Result<u64>;
        fn unpack_saved(hooks: &SavedHooks, id: u64) -> Result<UniquePtr<AtTensor>>;
        fn drop_saved(hooks: &SavedHooks, id: u64);
    }

    unsafe extern "C++" {
        include!("trainyard-torch/cpp/bridge.h");

        type AtTensor;
        type TensorList;
        fn share(tensor: &AtTensor) -> UniquePtr<AtTensor>;
        fn len(self: &TensorList) -> usize;
        fn take(self: Pin<&mut TensorList>, index: usize) -> Result<UniquePtr<AtTensor>>;
        fn push(self: Pin<&mut TensorList>, tensor: &AtTensor);
        fn push_undefined(self: Pin<&mut TensorList>);

        type StoreHandle;
        fn tcp_store(
            host: &str,
            port: u16,
            listen_fd: i32,
            timeout_ms: u64,
        ) -> Result<SharedPtr<StoreHandle>>;
        fn prefix_store(prefix: &str, store: &StoreHandle) -> Result<SharedPtr<StoreHandle>>;
        fn store_set(store: &StoreHandle, key: &str, value: &[u8]) -> Result<()>;
        fn store_get(store: &StoreHandle, key: &str, timeout_ms: u64) -> Result<Vec<u8>>;
        fn store_add(store: &StoreHandle, key: &str, amount: i64) -> Result<i64>;
        fn store_wait(store: &StoreHandle, key: &str, timeout_ms: u64) -> Result<()>;
        fn store_check(store: &StoreHandle, key: &str) -> Result<bool>;

        type GroupHandle;
        type WorkHandle;
        fn gloo_group(
            store: &StoreHandle,
            rank: i32,
            size: i32,
            address: &str,
            timeout_ms: u64,
        ) -> Result<SharedPtr<GroupHandle>>;
        fn load_gpu_library(path: &str) -> Result<()>;
        fn set_gpu_memory_limit(index: i32, bytes: u64) -> Result<()>;
        fn begin_step(profile: bool);
        fn end_step();
        fn gpu_group(
            store: &StoreHandle,
            rank: i32,
            size: i32,
            device: i32,
            name: &str,
            timeout_ms: u64,
        ) -> Result<SharedPtr<GroupHandle>>;
        fn abort_group(group: &GroupHandle) -> Result<()>;
        fn set_timeout(group: &GroupHandle, timeout_ms: u64) -> Result<()>;
        fn all_reduce(
            group: &GroupHandle,
            tensor: &AtTensor,
            op: u8,
        ) -> Result<UniquePtr<WorkHandle>>;
        fn all_gather(
            group: &GroupHandle,
            out: &AtTensor,
            input: &AtTensor,
        ) -> Result<UniquePtr<WorkHandle>>;
        fn reduce_scatter(
            group: &GroupHandle,
            out: &AtTensor,
            input: &AtTensor,
            op: u8,
        ) -> Result<UniquePtr<WorkHandle>>;
        fn all_to_all(
            group: &GroupHandle,
            out: &AtTensor,
            input: &AtTensor,
            out_splits: &[i64],
            in_splits: &[i64],
        ) -> Result<UniquePtr<WorkHandle>>;
        fn broadcast(
            group: &GroupHandle,
            tensor: &AtTensor,
            root: i32,
        ) -> Result<UniquePtr<WorkHandle>>;
        fn reduce(
            group: &GroupHandle,
            tensor: &AtTensor,
            root: i32,
            op: u8,
        ) -> Result<UniquePtr<WorkHandle>>;
        fn gather(
            group: &GroupHandle,
            outs: &[usize],
            input: &AtTensor,
            root: i32,
        ) -> Result<UniquePtr<WorkHandle>>;
        fn scatter(
            group: &GroupHandle,
            out: &AtTensor,
            inputs: &[usize],
            root: i32,
        ) -> Result<UniquePtr<WorkHandle>>;
        fn send(
            group: &GroupHandle,
            tensor: &AtTensor,
            peer: i32,
            tag: i32,
        ) -> Result<UniquePtr<WorkHandle>>;
        fn recv(
            group: &GroupHandle,
            tensor: &AtTensor,
            peer: i32,
            tag: i32,
        ) -> Result<UniquePtr<WorkHandle>>;
        fn start_coalescing(group: &GroupHandle) -> Result<()>;
        fn end_coalescing(group: &GroupHandle) -> Result<UniquePtr<WorkHandle>>;
        fn barrier(group: &GroupHandle) -> Result<UniquePtr<WorkHandle>>;
        fn work_wait(work: &WorkHandle) -> Result<()>;
        fn work_is_done(work: &WorkHandle) -> Result<bool>;

        type EventHandle;
        fn set_current_device(index: i32) -> Result<()>;
        fn current_stream(index: i32) -> Result<StreamId>;
        fn pool_stream(index: i32) -> Result<StreamId>;
        fn exchange_stream(stream: StreamId) -> Result<StreamId>;
        fn record_event(stream: StreamId) -> Result<UniquePtr<EventHandle>>;
        fn record_timed_event(stream: StreamId) -> Result<UniquePtr<EventHandle>>;
        fn elapsed_ms(from: &EventHandle, to: &EventHandle) -> Result<f64>;
        fn stream_wait_event(stream: StreamId, event: &EventHandle) -> Result<()>;
        fn event_is_done(event: &EventHandle) -> Result<bool>;
        fn synchronize_event(event: &EventHandle) -> Result<()>;
        fn record_stream(tensor: &AtTensor, stream: StreamId) -> Result<()>;
        fn copy_non_blocking(target: &AtTensor, source: &AtTensor) -> Result<()>;
        fn device_memory(index: i32, out: &mut [u64]) -> Result<()>;
        fn reset_peak_device_memory(index: i32) -> Result<()>;
        fn computes_values() -> bool;
        fn empty_pinned(shape: &[i64], scalar_type: i32) -> Result<UniquePtr<AtTensor>>;

        type HookHandle;
        fn add_leaf_hook(leaf: &AtTensor, hook: Box<LeafHook>) -> Result<UniquePtr<HookHandle>>;
        fn add_tensor_hook(
            tensor: &AtTensor,
            hook: Box<TensorHook>,
        ) -> Result<UniquePtr<HookHandle>>;
        fn remove_hook(handle: Pin<&mut HookHandle>) -> Result<()>;
        fn attach_backward(
            inputs: &[usize],
            outputs: &[usize],
            saved: &[usize],
            backward: Box<Backward>,
        ) -> Result<UniquePtr<TensorList>>;
        fn push_saved_hooks(hooks: Box<SavedHooks>) -> Result<()>;
        fn pop_saved_hooks();
        fn set_grad(leaf: &AtTensor, grad: &AtTensor) -> Result<()>;
        fn clear_grad(leaf: &AtTensor) -> Result<()>;
        fn backward(tensors: &[usize], gradients: &[usize]) -> Result<()>;
        fn run_backward_on_calling_thread();
        fn version(tensor: &AtTensor) -> Result<i64>;
        fn set_version(tensor: &AtTensor, version: i64) -> Result<()>;

        fn rebind(tensor: &AtTensor, data: &AtTensor) -> Result<()>;
        fn release_storage(tensor: &AtTensor) -> Result<()>;
        fn restore_storage(tensor: &AtTensor) -> Result<()>;
        fn swap_storages(a: &AtTensor, b: &AtTensor) -> Result<()>;
        fn storage_bytes(tensor: &AtTensor) -> Result<usize>;
        fn storage_address(tensor: &AtTensor) -> Result<usize>;
        fn is_meta(tensor: &AtTensor) -> bool;
        fn new_empty(like: &AtTensor, shape: &[i64]) -> Result<UniquePtr<AtTensor>>;
        fn new_zeros(like: &AtTensor, shape: &[i64]) -> Result<UniquePtr<AtTensor>>;
        fn new_without_storage(like: &AtTensor, shape: &[i64]) -> Result<UniquePtr<AtTensor>>;
        fn empty_meta(shape: &[i64], scalar_type: i32) -> Result<UniquePtr<AtTensor>>;

        fn fused_adamw(
            params: &[usize],
            grads: &[usize],
            exp_avgs: &[usize],
            exp_avg_sqs: &[usize],
            steps: &[usize],
            grad_scale: &[usize],
            found_inf: &[usize],
            lr: f64,
            beta1: f64,
            beta2: f64,
            eps: f64,
            weight_decay: f64,
        ) -> Result<()>;
        fn fused_sgd(
            params: &[usize],
            grads: &[usize],
            momenta: &[usize],
            grad_scale: &[usize],
            found_inf: &[usize],
            lr: f64,
            momentum: f64,
            dampening: f64,
            weight_decay: f64,
            nesterov: bool,
            first: bool,
        ) -> Result<()>;
        fn foreach_norm(tensors: &[usize]) -> Result<UniquePtr<TensorList>>;
        fn foreach_mul_scalar(tensors: &[usize], factor: f64) -> Result<()>;
        fn foreach_mul_tensor(tensors: &[usize], factor: &AtTensor) -> Result<()>;
        fn foreach_mul_list(tensors: &[usize], factors: &[usize]) -> Result<()>;
        fn foreach_add(tensors: &[usize], others: &[usize], alpha: f64) -> Result<()>;
        fn foreach_lerp(tensors: &[usize], ends: &[usize], weight: f64) -> Result<()>;
        fn foreach_addcmul(tensors: &[usize], a: &[usize], b: &[usize], value: f64) -> Result<()>;
        fn foreach_addcdiv(tensors: &[usize], a: &[usize], b: &[usize], value: f64) -> Result<()>;
        fn addcmul(tensor: &AtTensor, a: &AtTensor, b: &AtTensor, value: f64) -> Result<()>;
        fn foreach_copy(tensors: &[usize], sources: &[usize]) -> Result<()>;
        fn foreach_sqrt(tensors: &[usize]) -> Result<UniquePtr<TensorList>>;
        fn foreach_zero(tensors: &[usize]) -> Result<()>;
        fn rms_norm(x: &AtTensor, weight: &AtTensor, eps: f64) -> Result<UniquePtr<AtTensor>>;
        fn attention(
            q: &AtTensor,
            k: &AtTensor,
            v: &AtTensor,
            causal: bool,
        ) -> Result<UniquePtr<AtTensor>>;
        fn attention_block(
            q: &AtTensor,
            k: &AtTensor,
            v: &AtTensor,
            causal: bool,
        ) -> Result<UniquePtr<TensorList>>;
        fn attention_block_backward(
            gradient: &AtTensor,
            q: &AtTensor,
            k: &AtTensor,
            v: &AtTensor,
            out: &AtTensor,
            lse: &AtTensor,
            causal: bool,
        ) -> Result<UniquePtr<TensorList>>;
        fn register_meta_kernels() -> Result<()>;

        fn simulate_gpu(is_on_gpu: bool);
        fn use_deterministic_algorithms(on: bool) -> Result<()>;

        fn keep_freed_memory();
        fn report_uncaught_exceptions();
        fn throw_in_thread(message: &str, is_out_of_memory: bool);
        fn observe_memory();
        fn set_memory_kind(kind: u8) -> u8;
        fn memory_counters(out: &mut [u64]) -> Result<()>;
        fn reset_memory_peak();
        fn set_memory_limit(bytes: u64);
        fn record_allocations(on: bool);
        fn take_allocations() -> Vec<AllocationRecord>;
        fn observe_operators(on: bool) -> Result<()>;
        fn take_operators() -> Vec<OperatorRecord>;
    }
}

// SAFETY: c10d's stores lock their connection and its process groups lock their queue; both may be called from
// several threads.
unsafe impl Send for ffi::StoreHandle {}
// SAFETY: as above.
unsafe impl Sync for ffi::StoreHandle {}
// SAFETY: as above.
unsafe impl Send for ffi::GroupHandle {}
// SAFETY: as above.
unsafe impl Sync for ffi::GroupHandle {}
// SAFETY: c10d allows any thread to wait for a work, and its owner is the only one that does.
unsafe impl Send for ffi::WorkHandle {}
// SAFETY: libtorch removes a hook under the autograd node's mutex.
unsafe impl Send for ffi::HookHandle {}

/// A post-accumulate hook: runs after a gradient has been accumulated into a leaf.
pub(crate) struct LeafHook(pub Mutex<LeafHookFn>);
pub(crate) type LeafHookFn = Box<dyn FnMut(&Tensor) -> Result<()> + Send>;

/// Runs on the gradient of a tensor and may replace it.
pub(crate) struct TensorHook(pub Mutex<TensorHookFn>);
pub(crate) type TensorHookFn = Box<dyn FnMut(&Tensor) -> Result<Option<Tensor>> + Send>;

/// The backward of a custom function; `None` once its graph is released.
pub(crate) struct Backward(pub Mutex<Option<BackwardFn>>);
pub(crate) type BackwardFn =
    Box<dyn FnMut(&[Tensor], &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> + Send>;

/// The saved-tensor hooks that C++ calls.
pub(crate) struct SavedHooks(pub Box<dyn crate::saved::SavedTensorHooks>);

fn run_leaf_hook(hook: &LeafHook, leaf: &ffi::AtTensor) -> Result<()> {
    guarded("a post-accumulate hook", || lock(&hook.0)(&shared(leaf)))
}

fn run_tensor_hook(
    hook: &TensorHook,
    grad: &ffi::AtTensor,
) -> Result<cxx::UniquePtr<ffi::AtTensor>> {
    let replacement = guarded("a tensor hook", || lock(&hook.0)(&shared(grad)))?;
    Ok(replacement.map_or_else(cxx::UniquePtr::null, unique))
}

fn run_backward(
    backward: &Backward,
    saved: &[usize],
    grads: &[usize],
    mut out: std::pin::Pin<&mut ffi::TensorList>,
) -> Result<()> {
    let gradients = guarded("the backward of a custom function", || {
        let saved: Vec<Tensor> = saved.iter().filter_map(|&a| optional(a)).collect();
        let grads: Vec<Option<Tensor>> = grads.iter().map(|&a| optional(a)).collect();
        match lock(&backward.0).as_mut() {
            Some(body) => body(&saved, &grads),
            None => Err(TorchError::GraphReleased),
        }
    })?;
    for grad in &gradients {
        match grad {
            Some(grad) => out.as_mut().push(borrow(grad)),
            None => out.as_mut().push_undefined(),
        }
    }
    Ok(())
}

fn release_backward(backward: &Backward) {
    // Dropping the closure drops its captures, which may run code; a panic there must not unwind into C++.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(lock(&backward.0).take())));
}

fn pack_saved(hooks: &SavedHooks, tensor: &ffi::AtTensor) -> Result<u64> {
    guarded("a pack hook", || hooks.0.pack(shared(tensor)))
}

fn unpack_saved(hooks: &SavedHooks, id: u64) -> Result<cxx::UniquePtr<ffi::AtTensor>> {
    guarded("an unpack hook", || hooks.0.unpack(id)).map(unique)
}

fn drop_saved(hooks: &SavedHooks, id: u64) {
    let _ = catch_unwind(AssertUnwindSafe(|| hooks.0.release(id)));
}

/// Runs a callback; a panic becomes an error that names the callback.
fn guarded<T>(what: &'static str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let message = panic
            .downcast_ref::<&str>()
            .map(|s| (*s).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".to_owned());
        Err(TorchError::Panicked { what, message })
    })
}

/// A poisoned lock means that an earlier callback panicked, which was reported; the closure itself is intact.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

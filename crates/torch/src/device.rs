//! The device of this process: the current device of a thread, its streams and events, and pinned memory.
//!
//! A GPU executes what the host queues on a stream, in order; streams are ordered among each other by events only. On
//! CPU there are no streams: every operation here does nothing, so that callers need no second path.

use std::sync::OnceLock;

use cxx::UniquePtr;
use tch::kind::Element;
use tch::{Device, Kind, Tensor};

use crate::bridge::ffi;
use crate::error::Result;
use crate::ffi_tensor::{borrow, owned};
use crate::meta::scalar_type;

/// Makes `device` the current device of this thread. Every thread that allocates device memory, queues kernels or
/// starts collectives must call this first: a new thread starts with device 0.
pub fn set_current(device: Device) -> Result<()> {
    match index(device) {
        Some(index) => Ok(ffi::set_current_device(index)?),
        None => Ok(()),
    }
}

/// A stream of a device: a queue of kernels and copies.
#[derive(Clone, Copy)]
pub struct Stream(Option<ffi::StreamId>);

impl Stream {
    /// The stream on which this thread queues its work.
    pub fn current(device: Device) -> Result<Stream> {
        let stream = index(device).map(ffi::current_stream).transpose()?;
        Ok(Stream(stream))
    }

    /// A stream from libtorch's pool, to run beside the current one.
    pub fn from_pool(device: Device) -> Result<Stream> {
        let stream = index(device).map(ffi::pool_stream).transpose()?;
        Ok(Stream(stream))
    }

    pub(crate) fn id(&self) -> Option<ffi::StreamId> {
        self.0
    }

    /// Runs `body` with this stream as the current stream of the thread.
    pub fn scope<T>(&self, body: impl FnOnce() -> T) -> Result<T> {
        struct Restore(ffi::StreamId);
        impl Drop for Restore {
            fn drop(&mut self) {
                // Setting a stream that was current before cannot fail.
                let _ = ffi::exchange_stream(self.0);
            }
        }
        let _restore = match self.0 {
            Some(stream) => Some(Restore(ffi::exchange_stream(stream)?)),
            None => None,
        };
        Ok(body())
    }

    /// An event that is complete when everything queued on the stream so far is.
    pub fn record(&self) -> Result<Event> {
        let event = self.0.map(ffi::record_event).transpose()?;
        Ok(Event(event))
    }

    /// Makes everything queued on this stream from now on wait for `event`. The host continues.
    pub fn wait(&self, event: &Event) -> Result<()> {
        if let (Some(stream), Some(event)) = (self.0, event.0.as_ref().and_then(UniquePtr::as_ref))
        {
            ffi::stream_wait_event(stream, event)?;
        }
        Ok(())
    }

    /// Tells the allocator that this stream uses a tensor that was allocated on another one, so that its memory is
    /// reused only after what is queued here so far.
    pub fn keep(&self, tensor: &Tensor) -> Result<()> {
        match self.0 {
            Some(stream) if tensor.device().is_cuda() => {
                Ok(ffi::record_stream(borrow(tensor), stream)?)
            }
            _ => Ok(()),
        }
    }
}

/// A point in the work of a stream. On CPU it is always complete.
pub struct Event(Option<UniquePtr<ffi::EventHandle>>);

impl Event {
    /// Whether the point has been reached.
    pub fn is_done(&self) -> Result<bool> {
        match self.0.as_ref().and_then(UniquePtr::as_ref) {
            Some(event) => Ok(ffi::event_is_done(event)?),
            None => Ok(true),
        }
    }

    /// Blocks the host until the point has been reached.
    pub fn wait_host(&self) -> Result<()> {
        match self.0.as_ref().and_then(UniquePtr::as_ref) {
            Some(event) => Ok(ffi::synchronize_event(event)?),
            None => Ok(()),
        }
    }
}

// SAFETY: an event may be waited for on any thread; its owner is the only one that uses it.
unsafe impl Send for Event {}

/// A training step, from its construction until it is dropped, as GPU libraries see it: profilers of CUDA find its
/// beginning, and the simulated accelerator counts the host synchronizations within.
pub struct StepScope(());

impl StepScope {
    /// Begins a step. With `profile`, calls `cudaProfilerStart`.
    pub fn begin(profile: bool) -> StepScope {
        ffi::begin_step(profile);
        StepScope(())
    }
}

impl Drop for StepScope {
    fn drop(&mut self) {
        ffi::end_step();
    }
}

/// Copies `source` into `target` on the current stream. The host continues if the host's side is pinned; it must
/// neither change nor free what it copies from before an event after the copy is complete.
pub fn copy_non_blocking(target: &Tensor, source: &Tensor) -> Result<()> {
    Ok(ffi::copy_non_blocking(borrow(target), borrow(source))?)
}

/// A CPU tensor for copies to and from `device`: in pinned memory if that is a GPU, because copies from pageable
/// memory block the host. Its contents are undefined.
pub fn staging(shape: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
    if device.is_cuda() {
        return Ok(owned(ffi::empty_pinned(shape, scalar_type(kind)?)?));
    }
    Ok(Tensor::f_empty(shape, (kind, Device::Cpu))?)
}

/// The values in a CPU tensor for copies to `device`; see [`staging`].
pub fn staged<T: Element>(values: &[T], device: Device) -> Result<Tensor> {
    let pageable = Tensor::f_from_slice(values)?;
    if !device.is_cuda() {
        return Ok(pageable);
    }
    let mut pinned = staging(&pageable.size(), T::KIND, device)?;
    pinned.f_copy_(&pageable)?;
    Ok(pinned)
}

/// A tensor on `device` with these values. The host does not wait for the copy.
pub fn from_slice<T: Element>(values: &[T], device: Device) -> Result<Tensor> {
    upload(staged(values, device)?, device)
}

/// A copy on `device` of a tensor from [`staging`], made on the current stream; on CPU, the tensor itself. The host
/// does not wait: the allocator of pinned memory keeps the source until the copy is done.
pub fn upload(host: Tensor, device: Device) -> Result<Tensor> {
    if !device.is_cuda() {
        return Ok(host);
    }
    let tensor = Tensor::f_empty(host.size(), (host.kind(), device))?;
    copy_non_blocking(&tensor, &host)?;
    Ok(tensor)
}

/// Whether kernels compute values. They do not on the simulated CUDA libraries, where values that the host reads are
/// meaningless.
pub fn computes_values() -> bool {
    static COMPUTES: OnceLock<bool> = OnceLock::new();
    *COMPUTES.get_or_init(ffi::computes_values)
}

/// The memory of a GPU, as its caching allocator counts it, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Memory of tensors now.
    pub allocated: u64,
    /// Peak of `allocated` since the last reset.
    pub peak_allocated: u64,
    /// Memory that the allocator holds now, for tensors and for reuse.
    pub reserved: u64,
    /// Peak of `reserved` since the last reset. It decides whether a job runs out of memory.
    pub peak_reserved: u64,
    /// All memory of the device.
    pub capacity: u64,
}

/// The memory of a GPU; `None` on CPU.
pub fn memory(device: Device) -> Result<Option<DeviceMemory>> {
    let Some(index) = index(device) else {
        return Ok(None);
    };
    let mut counters = [0; 5];
    ffi::device_memory(index, &mut counters)?;
    let [allocated, peak_allocated, reserved, peak_reserved, capacity] = counters;
    Ok(Some(DeviceMemory {
        allocated,
        peak_allocated,
        reserved,
        peak_reserved,
        capacity,
    }))
}

/// Resets the peaks of a GPU's memory to the current values.
pub fn reset_peak_memory(device: Device) -> Result<()> {
    match index(device) {
        Some(index) => Ok(ffi::reset_peak_device_memory(index)?),
        None => Ok(()),
    }
}

pub(crate) fn index(device: Device) -> Option<i32> {
    match device {
        Device::Cuda(index) => Some(index as i32),
        _ => None,
    }
}

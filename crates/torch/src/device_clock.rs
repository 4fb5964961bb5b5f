//! The clock of a GPU: events with times, relative to one of which the host's time is known.

use std::fmt;
use std::sync::Arc;

use cxx::UniquePtr;
use tch::Device;
use trainyard_trace::{DeviceClock, DevicePoint, now_ns};

use crate::bridge::ffi;
use crate::device::{Stream, index};
use crate::error::Result;

/// A clock of `device`; `None` on CPU. Waits for the device, once.
pub(crate) fn start(device: Device) -> Result<Option<Box<dyn DeviceClock>>> {
    let Some(index) = index(device) else {
        return Ok(None);
    };
    let event = ffi::record_timed_event(ffi::current_stream(index)?)?;
    if let Some(event) = event.as_ref() {
        ffi::synchronize_event(event)?;
    }
    let origin = Arc::new(Origin {
        event: Event(event),
        time_ns: now_ns(),
    });
    Ok(Some(Box::new(GpuClock { device, origin })))
}

/// A point of the device and the host's time at it.
struct Origin {
    event: Event,
    time_ns: u64,
}

struct Event(UniquePtr<ffi::EventHandle>);

// SAFETY: libtorch's events may be used from any thread, and nothing here changes one after it was recorded.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

struct GpuClock {
    device: Device,
    origin: Arc<Origin>,
}

impl GpuClock {
    fn mark_on(&self, stream: Stream) -> Result<Option<Box<dyn DevicePoint>>> {
        let Some(stream) = stream.id() else {
            return Ok(None);
        };
        Ok(Some(Box::new(GpuPoint {
            event: Event(ffi::record_timed_event(stream)?),
            origin: self.origin.clone(),
        })))
    }
}

impl DeviceClock for GpuClock {
    fn mark(&self) -> Option<Box<dyn DevicePoint>> {
        self.mark_on(Stream::current(self.device).ok()?).ok()?
    }

    fn mark_after(&self, join: &mut dyn FnMut()) -> Option<Box<dyn DevicePoint>> {
        // A stream of its own, so that nothing else delays the point.
        let stream = Stream::from_pool(self.device).ok()?;
        stream.scope(join).ok()?;
        self.mark_on(stream).ok()?
    }
}

impl fmt::Debug for GpuClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GpuClock({:?})", self.device)
    }
}

struct GpuPoint {
    event: Event,
    origin: Arc<Origin>,
}

impl DevicePoint for GpuPoint {
    fn is_reached(&self) -> bool {
        is_reached(&self.event.0)
    }

    fn time_ns(&self) -> Option<u64> {
        let (origin, event) = (self.origin.event.0.as_ref()?, self.event.0.as_ref()?);
        ffi::synchronize_event(event).ok()?;
        let elapsed_ms = ffi::elapsed_ms(origin, event).ok()?;
        Some(self.origin.time_ns + (elapsed_ms * 1e6).max(0.0) as u64)
    }
}

impl fmt::Debug for GpuPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GpuPoint")
    }
}

/// A point without a time.
struct QueuedPoint(Event);

impl DevicePoint for QueuedPoint {
    fn is_reached(&self) -> bool {
        is_reached(&self.0.0)
    }

    fn time_ns(&self) -> Option<u64> {
        None
    }
}

impl fmt::Debug for QueuedPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("QueuedPoint")
    }
}

/// The point up to which this thread has queued work on `device`; `None` on CPU.
pub(crate) fn queued_point(device: Device) -> Option<Box<dyn DevicePoint>> {
    let stream = Stream::current(device).ok()?.id()?;
    let event = ffi::record_event(stream).ok()?;
    Some(Box::new(QueuedPoint(Event(event))))
}

/// An event that failed counts as reached: the error appears where the host waits.
fn is_reached(event: &UniquePtr<ffi::EventHandle>) -> bool {
    let event = event.as_ref();
    event.is_none_or(|event| ffi::event_is_done(event).unwrap_or(true))
}

//! Times on a device.
//!
//! A GPU executes what the host has queued, later. So a ledger that records, of a rank with a GPU, takes the times of
//! spans of compute and of collectives from the device: it marks points in the device's work, and asks for their times
//! when its events are read. And for every collective it keeps a point that the device reaches after it, because the host
//! does not wait for it: what has not been reached is pending.

use std::fmt::Debug;

/// Marks points in the work of a device.
pub trait DeviceClock: Debug + Send + Sync {
    /// The point up to which this thread has queued work.
    fn mark(&self) -> Option<Box<dyn DevicePoint>>;

    /// The point at which that is done for which `join` makes a stream of the device wait.
    fn mark_after(&self, join: &mut dyn FnMut()) -> Option<Box<dyn DevicePoint>>;
}

/// A point in the work of a device.
pub trait DevicePoint: Debug + Send {
    /// Whether the device has reached the point. Does not wait.
    fn is_reached(&self) -> bool;

    /// When the device reached the point, as a time of [`Ledger::now_ns`](crate::Ledger::now_ns). Waits until it has.
    fn time_ns(&self) -> Option<u64>;
}

/// The beginning and the end of something that a device executes.
#[derive(Debug)]
pub struct DeviceInterval {
    /// The point before it. It may begin later, after what a stream executes before it.
    pub from: Box<dyn DevicePoint>,
    /// The point after it.
    pub to: Box<dyn DevicePoint>,
    /// A point of another stream that is not reached before the end, if there is one. Streams are not scheduled at
    /// once, so it may be the earlier one of both.
    pub joined: Option<Box<dyn DevicePoint>>,
}

impl DeviceInterval {
    /// Begin and end; `None` if the device failed.
    pub(crate) fn times_ns(&self) -> Option<(u64, u64)> {
        let joined = self.joined.as_ref().and_then(|point| point.time_ns());
        let to = self.to.time_ns()?.min(joined.unwrap_or(u64::MAX));
        Some((self.from.time_ns()?.min(to), to))
    }
}

/// What a device does for a collective, after the host has gone on.
#[derive(Debug, Default)]
pub struct OnDevice {
    /// Its times, if the ledger takes them from the device.
    pub interval: Option<DeviceInterval>,
    /// A point after it.
    pub done: Option<Box<dyn DevicePoint>>,
}

//! The state shared by the caller and the two I/O threads, and the loops of these threads. One reads and one writes,
//! so that a read does not wait for writes of other records.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tch::Tensor;

use super::counters::{Counters, Meter};
use super::error::{OffloadError, Result};
use super::file::{Content, SpillFile};
use super::queue::{Claim, Prefetch, Queue};

/// The state of a spill, without the threads themselves.
pub(super) struct Pipeline {
    pub file: SpillFile,
    num_buffers: usize,
    state: Mutex<State>,
    /// Signals that an operation was queued or finished, or that the spill is closing.
    changed: Condvar,
}

struct State {
    queue: Queue<Tensor>,
    /// Errors of background writes, not reported to the caller yet.
    failures: VecDeque<OffloadError>,
    meter: Meter,
    bytes_read: u64,
    bytes_written: u64,
    waited: Duration,
    is_closing: bool,
}

impl State {
    fn take_failure(&mut self) -> Result<()> {
        self.failures.pop_front().map_or(Ok(()), Err)
    }
}

// Called by the user of the spill.
impl Pipeline {
    pub(super) fn new(file: SpillFile, buffers: Vec<Tensor>) -> Pipeline {
        Pipeline {
            num_buffers: buffers.len(),
            state: Mutex::new(State {
                queue: Queue::new(file.layout.records().len(), buffers),
                failures: VecDeque::new(),
                meter: Meter::default(),
                bytes_read: 0,
                bytes_written: 0,
                waited: Duration::ZERO,
                is_closing: false,
            }),
            changed: Condvar::new(),
            file,
        }
    }

    pub(super) fn prefetch(&self, record: usize) -> Result<bool> {
        let mut state = self.lock();
        state.take_failure()?;
        match state.queue.prefetch(record) {
            Prefetch::Queued => self.changed.notify_all(),
            Prefetch::NoBuffer => return Ok(false),
            Prefetch::Taken => return Err(OffloadError::AlreadyTaken { record }),
        }
        Ok(true)
    }

    /// Waits until the record is in a buffer.
    pub(super) fn claim(&self, record: usize) -> Result<Tensor> {
        let num_buffers = self.num_buffers;
        let mut state = self.lock();
        loop {
            // Checked on every iteration: the failed write may be that of this record.
            state.take_failure()?;
            match state.queue.claim(record) {
                Claim::Ready(buffer) => return Ok(buffer),
                Claim::Failed(e) => return Err(e),
                Claim::NoBuffer => return Err(OffloadError::NoBuffer { num_buffers }),
                Claim::Taken => return Err(OffloadError::AlreadyTaken { record }),
                Claim::Wait => state = self.wait(state),
            }
        }
    }

    /// Queues a write, and reports an earlier one that failed. The new one is queued in either case: a caller that
    /// ignores the error would otherwise read stale data.
    pub(super) fn put(&self, record: usize, buffer: Tensor) -> Result<()> {
        let mut state = self.lock();
        state.queue.put(record, buffer);
        self.changed.notify_all();
        state.take_failure()
    }

    pub(super) fn release(&self, record: usize, buffer: Tensor) {
        self.lock().queue.release(record, buffer);
    }

    /// Waits until all queued writes are done.
    pub(super) fn flush(&self) -> Result<()> {
        let mut state = self.lock();
        while state.queue.is_writing() {
            state = self.wait(state);
        }
        state.take_failure()
    }

    /// Stops the threads; queued operations are dropped.
    pub(super) fn close(&self) {
        self.lock().is_closing = true;
        self.changed.notify_all();
    }

    pub(super) fn counters(&self) -> Counters {
        let state = self.lock();
        Counters {
            bytes_read: state.bytes_read,
            bytes_written: state.bytes_written,
            busy: state.meter.busy(Instant::now()),
            waited: state.waited,
        }
    }

    /// Wakes the threads, and waits for a change.
    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.notify_all();
        let began = Instant::now();
        let mut state = sleep(&self.changed, state);
        state.waited += began.elapsed();
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|p| p.into_inner())
    }
}

// Called by the I/O threads.
impl Pipeline {
    pub(super) fn read_until_closed(&self) {
        while let Some((record, buffer, content)) = self.next(Queue::next_read) {
            let result = self.guarded(|| self.file.read(record, &buffer, content));
            self.done(|state| {
                if result.is_ok() && content != Content::Zeros {
                    state.bytes_read += self.file.num_bytes(record);
                }
                state.queue.read_done(record, buffer, result);
            });
        }
    }

    pub(super) fn write_until_closed(&self) {
        while let Some((record, buffer)) = self.next(Queue::next_write) {
            let result = self.guarded(|| self.file.write(record, &buffer));
            self.done(|state| {
                let content = match result {
                    Ok(checksum) => {
                        state.bytes_written += self.file.num_bytes(record);
                        Content::Written(checksum)
                    }
                    Err(e) => {
                        state.failures.push_back(e);
                        Content::Lost
                    }
                };
                state.queue.write_done(record, buffer, content);
            });
        }
    }

    /// Waits for the next operation; `None` if the spill is closing.
    fn next<T>(&self, pick: impl Fn(&mut Queue<Tensor>) -> Option<T>) -> Option<T> {
        let mut state = self.lock();
        loop {
            if state.is_closing {
                return None;
            }
            if let Some(job) = pick(&mut state.queue) {
                state.meter.begin(Instant::now());
                return Some(job);
            }
            state = sleep(&self.changed, state);
        }
    }

    fn done(&self, update: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        state.meter.end(Instant::now());
        update(&mut state);
        self.changed.notify_all();
    }

    /// Turns a panic into an error, since a caller may wait for the result.
    fn guarded<T>(&self, job: impl FnOnce() -> Result<T>) -> Result<T> {
        catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|panic| {
            Err(OffloadError::Panicked {
                path: self.file.path().to_owned(),
                message: message(&*panic),
            })
        })
    }
}

fn sleep<'a>(changed: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    changed.wait(state).unwrap_or_else(|p| p.into_inner())
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}

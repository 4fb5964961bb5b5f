//! The state that the caller and the two threads share, and what the threads do: one reads, one
//! writes, so that a read does not wait for writes of other records.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tch::Tensor;

use super::counters::{Counters, Meter};
use super::error::{OffloadError, Result};
use super::file::{Content, SpillFile};
use super::queue::{Asked, Claim, Queue};

/// Everything but the threads themselves.
pub(super) struct Pipeline {
    pub file: SpillFile,
    num_buffers: usize,
    state: Mutex<State>,
    /// Something was queued, something is over, or the end has come.
    changed: Condvar,
}

struct State {
    queue: Queue<Tensor>,
    /// Of writes, whose caller went on long ago.
    failures: VecDeque<OffloadError>,
    meter: Meter,
    bytes_read: u64,
    bytes_written: u64,
    waited: Duration,
    is_closing: bool,
}

impl State {
    fn tell_failure(&mut self) -> Result<()> {
        self.failures.pop_front().map_or(Ok(()), Err)
    }
}

// What the caller does.
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

    pub(super) fn ask(&self, record: usize) -> Result<bool> {
        let mut state = self.lock();
        state.tell_failure()?;
        match state.queue.ask(record) {
            Asked::Coming => self.changed.notify_all(),
            Asked::NoBuffer => return Ok(false),
            Asked::Taken => return Err(OffloadError::Taken { record }),
        }
        Ok(true)
    }

    /// Waits until the record is in a buffer.
    pub(super) fn claim(&self, record: usize) -> Result<Tensor> {
        let num_buffers = self.num_buffers;
        let mut state = self.lock();
        loop {
            // Looked at every time: the record waited for may be the one that was not written.
            state.tell_failure()?;
            match state.queue.claim(record) {
                Claim::Ready(buffer) => return Ok(buffer),
                Claim::Failed(e) => return Err(e),
                Claim::NoBuffer => return Err(OffloadError::NoBuffer { num_buffers }),
                Claim::Taken => return Err(OffloadError::Taken { record }),
                Claim::Wait => state = self.wait(state),
            }
        }
    }

    /// Queues a write, and tells of an earlier one that failed. The new one is queued either way:
    /// otherwise whoever goes on regardless would read what was there before.
    pub(super) fn put(&self, record: usize, buffer: Tensor) -> Result<()> {
        let mut state = self.lock();
        state.queue.put(record, buffer);
        self.changed.notify_all();
        state.tell_failure()
    }

    pub(super) fn give_back(&self, record: usize, buffer: Tensor) {
        self.lock().queue.give_back(record, buffer);
    }

    /// Waits until nothing is left to write.
    pub(super) fn flush(&self) -> Result<()> {
        let mut state = self.lock();
        while state.queue.is_writing() {
            state = self.wait(state);
        }
        state.tell_failure()
    }

    /// Ends the threads; what is queued stays undone.
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

    /// Lets the threads see what was queued, and waits for a change.
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

// What the threads do.
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

    /// Waits for something to do; `None` is the end.
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

    fn done(&self, record_it: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        state.meter.end(Instant::now());
        record_it(&mut state);
        self.changed.notify_all();
    }

    /// Somebody may wait for the outcome: a panic must become one.
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
    let words = panic.downcast_ref::<&str>().copied();
    let words = words.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    words.unwrap_or("no message").to_owned()
}

//! The handle of a collective that has been started.

use std::sync::Arc;

use cxx::UniquePtr;
use tch::{Device, Tensor};
use trainyard_trace::{Collective, DeviceInterval, Ledger, OnDevice};

use crate::bridge::ffi;
use crate::direct_collectives::wait_all;
use crate::error::{Cause, CommunicationError, Result};
use crate::peers::Peers;
use crate::{comm_thread, device_clock, interleave};

/// A started collective, like c10d's `Work`. Its tensors may be used only after [`Work::wait`].
///
/// With Gloo, `wait` blocks until the result is available. With NCCL, it only makes the current stream wait: the host
/// continues, and kernels queued on the stream afterwards see the result.
#[must_use = "the tensors of a collective may be used only after `wait`"]
pub struct Work(Option<Pending>);

struct Pending {
    state: State,
    ledger: Ledger,
    handle: trainyard_trace::CollectiveHandle,
    /// The collective on the device, if the ledger takes its times from there.
    interval: Option<DeviceInterval>,
    /// The error to report if the collective fails; only its cause is filled in later.
    error: CommunicationError,
    aborted: Arc<std::sync::atomic::AtomicBool>,
    /// Names the peers that are gone.
    peers: Option<Peers>,
}

pub(crate) enum State {
    /// Complete: the group is fake or has one rank.
    Done,
    /// Queued on the group's communication thread.
    Queued(Arc<comm_thread::Completion>),
    /// Posted to the backend directly, with the tensors that must stay alive until completion.
    Posted(Vec<UniquePtr<ffi::WorkHandle>>, Vec<Tensor>),
}

impl State {
    /// From the point at which the caller's stream allows a posted collective to start, to its end.
    fn interval(&self, ledger: &Ledger) -> Option<DeviceInterval> {
        let State::Posted(works, tensors) = self else {
            return None;
        };
        let clock = ledger.device_clock()?;
        gpu_of(tensors)?;
        let from = clock.mark()?;
        let mut join = || {
            for work in works.iter().filter_map(UniquePtr::as_ref) {
                // An error appears again when the caller waits.
                let _ = ffi::work_wait(work);
            }
        };
        let to = clock.mark_after(&mut join)?;
        Some(DeviceInterval {
            from,
            to,
            joined: None,
        })
    }
}

/// The GPU of the tensors of a collective, if a GPU executes it.
fn gpu_of(tensors: &[Tensor]) -> Option<Device> {
    let mut devices = tensors.iter().map(Tensor::device);
    devices.find(|device| device.is_cuda())
}

impl Work {
    /// The collective of a group with one rank: complete from the start, and not recorded as communication.
    pub(crate) fn completed() -> Work {
        Work(None)
    }

    pub(crate) fn new(
        state: State,
        ledger: &Ledger,
        record: Collective,
        error: CommunicationError,
        aborted: &Arc<std::sync::atomic::AtomicBool>,
        peers: Option<&Peers>,
    ) -> Work {
        Work(Some(Pending {
            interval: state.interval(ledger),
            state,
            ledger: ledger.clone(),
            handle: ledger.begin(record),
            error,
            aborted: Arc::clone(aborted),
            peers: peers.cloned(),
        }))
    }

    /// Waits for the result (with NCCL: makes the current stream wait for it).
    pub fn wait(mut self) -> Result<()> {
        let Some(pending) = self.0.take() else {
            return Ok(());
        };
        interleave::yield_turn();
        pending.finish()
    }

    /// Whether the result is available, so that `wait` would return at once. With NCCL: whether the device is done.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            None => true,
            Some(pending) => match &pending.state {
                State::Done => true,
                State::Queued(completion) => completion.is_done(),
                State::Posted(works, _) => works.iter().all(|work| {
                    let work = work.as_ref();
                    // An error counts as done: `wait` reports it.
                    work.is_none_or(|work| ffi::work_is_done(work).unwrap_or(true))
                }),
            },
        }
    }
}

impl Drop for Work {
    /// Waits for a work that the caller did not wait for, for example because of an earlier error: its tensors must
    /// not be freed while it runs. Its own error can only be logged.
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(Pending::finish) {
            tracing::error!("a collective failed that was dropped without a wait: {error}");
        }
    }
}

impl Pending {
    fn finish(mut self) -> Result<()> {
        let began = self.ledger.now_ns();
        self.ledger.wait(&self.handle, began);
        let mut done = None;
        let (started, ended, result) = match self.state {
            State::Done => (began, began, Ok(())),
            State::Queued(completion) => {
                let progress = completion.wait();
                let result = progress.result.unwrap_or(Ok(()));
                (progress.started_ns, progress.ended_ns, result)
            }
            State::Posted(works, tensors) => {
                let result = wait_all(works, || {});
                done = gpu_of(&tensors).and_then(device_clock::queued_point);
                drop(tensors);
                if let (Some(interval), Some(clock)) =
                    (&mut self.interval, self.ledger.device_clock())
                {
                    interval.joined = clock.mark();
                }
                (0, self.ledger.now_ns(), result)
            }
        };
        let waited = (began, self.ledger.now_ns());
        let on_device = OnDevice {
            interval: self.interval,
            done,
        };
        self.ledger.finish(self.handle, on_device, |record| {
            record.started_ns = if started == 0 {
                record.issued_ns
            } else {
                started
            };
            record.ended_ns = ended;
            record.waited = Some(waited);
        });
        let aborted = self.aborted.load(std::sync::atomic::Ordering::Acquire);
        result.map_err(|message| {
            let mut error = self.error;
            error.cause = Cause::from_message(&message, aborted);
            if let (Cause::PeerLost { ranks, .. }, Some(peers)) = (&mut error.cause, self.peers) {
                *ranks = peers.lost();
            }
            Box::new(error).into()
        })
    }
}

//! A collective under way.

use std::sync::Arc;

use cxx::UniquePtr;
use tch::Tensor;
use trainyard_trace::{Collective, Ledger};

use crate::bridge::ffi;
use crate::compose::wait_all;
use crate::error::{Cause, CommunicationError, Result};
use crate::{lane, turns};

/// A collective that was started and must be waited for before its tensors are touched.
///
/// On CPU (Gloo) `wait` returns when the result is there. On NCCL it only makes the current stream
/// wait: the host goes on, and work queued on the stream afterwards sees the result.
#[must_use = "the tensors of a collective may be used only after `wait`"]
pub struct Work(Option<Pending>);

struct Pending {
    state: State,
    ledger: Ledger,
    ticket: trainyard_trace::Ticket,
    /// Whom and what an error is about, but for its cause.
    about: CommunicationError,
    aborted: Arc<std::sync::atomic::AtomicBool>,
}

pub(crate) enum State {
    /// Nothing is left to do: a fake group, or messages that were never sent.
    Done,
    /// The group's lane is at it.
    Lane(Arc<lane::Ticket>),
    /// Messages posted directly; their tensors are held until they are through.
    Posted(Vec<UniquePtr<ffi::WorkHandle>>, Vec<Tensor>),
}

impl Work {
    /// A collective of a group of one: complete from the start, and not communication.
    pub(crate) fn nothing() -> Work {
        Work(None)
    }

    pub(crate) fn new(
        state: State,
        ledger: &Ledger,
        record: Collective,
        about: CommunicationError,
        aborted: &Arc<std::sync::atomic::AtomicBool>,
    ) -> Work {
        Work(Some(Pending {
            state,
            ledger: ledger.clone(),
            ticket: ledger.begin(record),
            about,
            aborted: Arc::clone(aborted),
        }))
    }

    /// Waits for the result (on NCCL: orders the current stream after it).
    pub fn wait(mut self) -> Result<()> {
        let Some(pending) = self.0.take() else {
            return Ok(());
        };
        turns::pass();
        pending.finish()
    }

    /// Whether `wait` would return at once. Messages say so only once they were waited for.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            None => true,
            Some(pending) => match &pending.state {
                State::Done => true,
                State::Lane(ticket) => ticket.is_done(),
                State::Posted(..) => false,
            },
        }
    }
}

impl Drop for Work {
    /// A work that was not waited for, as when an error made the caller leave early, is waited for
    /// here: its memory must not be freed under it. Its own error can only be logged.
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(Pending::finish) {
            tracing::error!("a collective nobody waited for failed: {error}");
        }
    }
}

impl Pending {
    fn finish(self) -> Result<()> {
        let began = self.ledger.now_ns();
        self.ledger.wait(&self.ticket, began);
        let (started, ended, result) = match self.state {
            State::Done => (began, began, Ok(())),
            State::Lane(ticket) => {
                let progress = ticket.wait();
                let result = progress.result.unwrap_or(Ok(()));
                (progress.started_ns, progress.ended_ns, result)
            }
            State::Posted(works, tensors) => {
                let result = wait_all(works, || {});
                drop(tensors);
                (0, self.ledger.now_ns(), result)
            }
        };
        let waited = (began, self.ledger.now_ns());
        self.ledger.finish(self.ticket, |record| {
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
            let mut error = self.about;
            error.cause = Cause::from_message(&message, aborted);
            Box::new(error).into()
        })
    }
}

//! Time spans of a rank.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::{DeviceInterval, DevicePoint, Ledger, named_enum::named_enum};

named_enum! {
    /// What a span of time was spent on.
    "kind of span"
    SpanKind {
        /// A complete training step.
        Step = "step",
        /// The forward pass.
        Forward = "forward",
        /// The backward pass.
        Backward = "backward",
        /// Gradient clipping and the optimizer step.
        Optimizer = "optimizer",
        /// Computation of any pass, in traces of programs that do not mark their passes.
        Compute = "compute",
        /// Loading a batch.
        Data = "data",
        /// One unit of the model, within a forward or backward pass.
        Unit = "unit",
        /// Evaluation.
        Evaluation = "evaluation",
        /// Saving or loading a checkpoint.
        Checkpoint = "checkpoint",
        /// Anything else worth showing.
        Other = "other",
    }
}

impl SpanKind {
    /// Whether a GPU executes what such a span queues.
    const fn is_on_device(self) -> bool {
        !matches!(
            self,
            SpanKind::Data | SpanKind::Checkpoint | SpanKind::Other
        )
    }

    /// Whether communication during such a span counts as hidden behind compute.
    pub const fn is_compute(self) -> bool {
        matches!(
            self,
            SpanKind::Forward | SpanKind::Backward | SpanKind::Optimizer | SpanKind::Compute
        )
    }
}

/// A named span of time on one thread.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The name in the trace.
    pub name: String,
    /// What the time was spent on.
    pub kind: SpanKind,
    /// When the span began.
    pub started_ns: u64,
    /// When the span ended.
    pub ended_ns: u64,
    /// The number of the thread, see [`current_thread`].
    pub thread: u64,
}

impl Span {
    /// The duration of the span.
    pub fn duration_ns(&self) -> u64 {
        self.ended_ns.saturating_sub(self.started_ns)
    }
}

/// A span in progress. Dropping the guard ends the span and records it in the ledger.
#[must_use = "the span ends when this is dropped"]
#[derive(Debug)]
pub struct SpanGuard<'a> {
    ledger: &'a Ledger,
    name: String,
    kind: SpanKind,
    started_ns: u64,
    /// The point of the device before the span, if it is timed there.
    from: Option<Box<dyn DevicePoint>>,
}

impl<'a> SpanGuard<'a> {
    pub(crate) fn open(ledger: &'a Ledger, kind: SpanKind, name: String) -> SpanGuard<'a> {
        SpanGuard {
            ledger,
            name,
            kind,
            started_ns: ledger.now_ns(),
            from: mark(ledger, kind),
        }
    }
}

fn mark(ledger: &Ledger, kind: SpanKind) -> Option<Box<dyn DevicePoint>> {
    let clock = ledger.device_clock().filter(|_| kind.is_on_device())?;
    clock.mark()
}

impl Drop for SpanGuard<'_> {
    fn drop(&mut self) {
        let interval = self.from.take().zip(mark(self.ledger, self.kind));
        let interval = interval.map(|(from, to)| DeviceInterval {
            from,
            to,
            joined: None,
        });
        let span = Span {
            name: std::mem::take(&mut self.name),
            kind: self.kind,
            started_ns: self.started_ns,
            ended_ns: self.ledger.now_ns(),
            thread: current_thread(),
        };
        self.ledger.span_on_device(span, interval);
    }
}

/// A small number that identifies the calling thread for its lifetime, assigned at the first call.
pub fn current_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    // A thread that is shutting down has no thread locals; all such threads share one number.
    NUMBER
        .try_with(|number| *number)
        .unwrap_or(u64::from(u32::MAX))
}

//! Stretches of a rank's time.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::{Ledger, named::named};

named! {
    /// What a stretch of time was spent on.
    "kind of span"
    SpanKind {
        /// A whole training step.
        Step = "step",
        /// Forward of the model.
        Forward = "forward",
        /// Backward of the model.
        Backward = "backward",
        /// Clipping and the optimiser's update.
        Optimizer = "optimizer",
        /// Waiting for, or making, a batch.
        Data = "data",
        /// One unit of the model, inside a forward or a backward.
        Unit = "unit",
        /// Evaluation.
        Evaluation = "evaluation",
        /// Saving or loading.
        Checkpoint = "checkpoint",
        /// Anything else worth seeing.
        Other = "other",
    }
}

impl SpanKind {
    /// Whether such spans are the compute that communication can hide behind.
    pub const fn is_compute(self) -> bool {
        matches!(
            self,
            SpanKind::Forward | SpanKind::Backward | SpanKind::Optimizer
        )
    }
}

/// A named stretch of time on one thread.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// What a reader of the trace sees.
    pub name: String,
    /// What the time was spent on.
    pub kind: SpanKind,
    /// When it began.
    pub started_ns: u64,
    /// When it ended.
    pub ended_ns: u64,
    /// The thread, as [`current_thread`] numbers them.
    pub thread: u64,
}

impl Span {
    /// How long it took.
    pub fn duration_ns(&self) -> u64 {
        self.ended_ns.saturating_sub(self.started_ns)
    }
}

/// A span that is still open; dropping it writes it into the ledger.
#[must_use = "the span ends when this is dropped"]
#[derive(Debug)]
pub struct SpanGuard<'a> {
    ledger: &'a Ledger,
    name: String,
    kind: SpanKind,
    started_ns: u64,
}

impl<'a> SpanGuard<'a> {
    pub(crate) fn open(ledger: &'a Ledger, kind: SpanKind, name: String) -> SpanGuard<'a> {
        SpanGuard {
            ledger,
            name,
            kind,
            started_ns: ledger.now_ns(),
        }
    }
}

impl Drop for SpanGuard<'_> {
    fn drop(&mut self) {
        self.ledger.span(Span {
            name: std::mem::take(&mut self.name),
            kind: self.kind,
            started_ns: self.started_ns,
            ended_ns: self.ledger.now_ns(),
            thread: current_thread(),
        });
    }
}

/// A small number for the calling thread, the same as long as it lives, given in order of asking.
pub fn current_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    // A thread that is being torn down has no locals left; its spans share one last number.
    NUMBER
        .try_with(|number| *number)
        .unwrap_or(u64::from(u32::MAX))
}

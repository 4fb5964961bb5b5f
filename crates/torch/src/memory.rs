//! Who holds how many bytes: every allocation and release on CPU and meta, counted by kind.

use trainyard_trace::{Allocation, MemoryKind};

use crate::bridge::ffi;
use crate::error::Result;

const NUM_KINDS: usize = 6;

/// Kinds in the order the counters hold them.
pub const KINDS: [MemoryKind; NUM_KINDS] = [
    MemoryKind::Parameter,
    MemoryKind::Gradient,
    MemoryKind::Optimizer,
    MemoryKind::Activation,
    MemoryKind::Communication,
    MemoryKind::Other,
];

/// Bytes held now, and when most were held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Held now, by kind in the order of [`KINDS`].
    pub held: [u64; NUM_KINDS],
    /// Held at the moment of the peak, by kind.
    pub at_peak: [u64; NUM_KINDS],
    /// Held now, in all.
    pub total: u64,
    /// The most that was held at once since the last reset.
    pub peak: u64,
}

/// Starts counting; allocations made before are not known. Stays on for the life of the program.
pub fn observe() {
    ffi::observe_memory();
}

/// Asks for huge pages behind large tensors on CPU, which saves the page faults of steps that take
/// and give back the same megabytes again and again. To be called first thing in `main`: libtorch
/// reads the setting once, and the environment must not change while other threads read it.
pub fn use_huge_pages() {
    const SWITCH: &str = "THP_MEM_ALLOC_ENABLE";
    if std::env::var_os(SWITCH).is_none() {
        // SAFETY: no other thread exists yet, as documented.
        unsafe { std::env::set_var(SWITCH, "1") };
    }
}

/// Lets the process keep what it frees on CPU: every step takes the same again, and memory that went
/// back to the system costs a page fault for every page. Only glibc can be told so.
pub fn keep_freed() {
    ffi::keep_freed_memory();
}

/// What this thread allocates in `body` counts as `kind`.
pub fn scope<T>(kind: MemoryKind, body: impl FnOnce() -> T) -> T {
    struct Restore(u8);
    impl Drop for Restore {
        fn drop(&mut self) {
            ffi::set_memory_kind(self.0);
        }
    }
    let _restore = Restore(ffi::set_memory_kind(number(kind)));
    body()
}

/// The counters now.
pub fn report() -> Result<MemoryReport> {
    let mut raw = [0u64; 2 * NUM_KINDS + 2];
    ffi::memory_counters(&mut raw)?;
    let mut report = MemoryReport {
        total: raw[2 * NUM_KINDS],
        peak: raw[2 * NUM_KINDS + 1],
        ..MemoryReport::default()
    };
    report.held.copy_from_slice(&raw[..NUM_KINDS]);
    report
        .at_peak
        .copy_from_slice(&raw[NUM_KINDS..2 * NUM_KINDS]);
    Ok(report)
}

/// Begins a new peak from what is held now.
pub fn reset_peak() {
    ffi::reset_memory_peak();
}

/// Lets tensors on CPU hold no more than so many bytes: what would exceed it is refused with an error
/// that says so. `None` lifts the limit. Counts what [`observe`] counts.
pub fn limit(bytes: Option<u64>) {
    observe();
    ffi::set_memory_limit(bytes.unwrap_or(0));
}

/// Runs `body` and returns every allocation and release made meanwhile, by any thread. One record
/// at a time.
pub fn record<T>(body: impl FnOnce() -> T) -> (T, Vec<Allocation>) {
    /// Stops, and leaves nothing unread behind, even when `body` panics.
    struct Stop;
    impl Drop for Stop {
        fn drop(&mut self) {
            ffi::record_allocations(false);
            drop(ffi::take_allocations());
        }
    }
    ffi::record_allocations(true);
    let stop = Stop;
    let out = body();
    let records = ffi::take_allocations();
    drop(stop);
    let taken = records.into_iter().map(|r| Allocation {
        at_ns: r.time_ns,
        bytes: r.bytes,
        kind: KINDS[usize::from(r.kind).min(NUM_KINDS - 1)],
    });
    (out, taken.collect())
}

fn number(kind: MemoryKind) -> u8 {
    match kind {
        MemoryKind::Parameter => 0,
        MemoryKind::Gradient => 1,
        MemoryKind::Optimizer => 2,
        MemoryKind::Activation => 3,
        MemoryKind::Communication => 4,
        MemoryKind::Other => 5,
    }
}

//! Memory accounting: every allocation and release on the device that the process trains on, counted by kind.

use std::sync::{Mutex, PoisonError};

use tch::Device;
use trainyard_trace::{Allocation, MemoryKind};

use crate::bridge::ffi;
use crate::device;
use crate::error::Result;

const NUM_KINDS: usize = 6;

/// Memory kinds in the order of the counters.
pub const KINDS: [MemoryKind; NUM_KINDS] = [
    MemoryKind::Parameter,
    MemoryKind::Gradient,
    MemoryKind::Optimizer,
    MemoryKind::Activation,
    MemoryKind::Communication,
    MemoryKind::Other,
];

/// Allocated bytes now and at the peak.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Bytes allocated now, by kind in the order of [`KINDS`].
    pub allocated: [u64; NUM_KINDS],
    /// Bytes allocated at the moment of the peak, by kind.
    pub at_peak: [u64; NUM_KINDS],
    /// Bytes allocated now in total.
    pub total: u64,
    /// Peak of `total` since the last reset.
    pub peak: u64,
}

/// Starts counting, for the rest of the process: meta tensors, and GPU memory if a GPU library
/// is loaded, or else CPU memory.
/// Earlier allocations are not counted.
pub fn observe() {
    ffi::observe_memory();
}

/// Uses transparent huge pages for large CPU tensors, which saves page faults in steps that allocate and free the
/// same memory again and again. Call this first in `main`: libtorch reads the setting once, and the environment must
/// not change while other threads read it.
pub fn use_huge_pages() {
    const VARIABLE: &str = "THP_MEM_ALLOC_ENABLE";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: the caller ensures that no other thread exists yet.
        unsafe { std::env::set_var(VARIABLE, "1") };
    }
}

/// Makes the process keep freed CPU memory instead of returning it to the kernel: every step allocates the same
/// again, and each returned page costs a page fault. Has an effect with glibc only.
pub fn keep_freed() {
    ffi::keep_freed_memory();
}

/// Runs `body`; allocations that this thread makes in it count as `kind`.
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

/// Reads the counters.
pub fn report() -> Result<MemoryReport> {
    let mut raw = [0u64; 2 * NUM_KINDS + 2];
    ffi::memory_counters(&mut raw)?;
    let mut report = MemoryReport {
        total: raw[2 * NUM_KINDS],
        peak: raw[2 * NUM_KINDS + 1],
        ..MemoryReport::default()
    };
    report.allocated.copy_from_slice(&raw[..NUM_KINDS]);
    report
        .at_peak
        .copy_from_slice(&raw[NUM_KINDS..2 * NUM_KINDS]);
    Ok(report)
}

/// Resets the peak to the current total.
pub fn reset_peak() {
    ffi::reset_memory_peak();
}

/// Limits the memory of a device: an allocation that would exceed `bytes` fails with an error. `None` removes the
/// limit. On CPU the limit holds for what [`observe`] counts, on a GPU for what the allocator reserves.
pub fn limit(device: Device, bytes: Option<u64>) -> Result<()> {
    observe();
    let bytes = bytes.unwrap_or(0);
    match device::index(device) {
        Some(index) => ffi::set_gpu_memory_limit(index, bytes)?,
        None => ffi::set_memory_limit(bytes),
    }
    Ok(())
}

/// Runs `body` and returns every allocation and release that any thread made meanwhile. A process makes one recording at a
/// time: a second one waits for the end of the first.
pub fn record<T>(body: impl FnOnce() -> T) -> (T, Vec<Allocation>) {
    static RECORDING: Mutex<()> = Mutex::new(());
    let _only = RECORDING.lock().unwrap_or_else(PoisonError::into_inner);
    /// Stops recording and discards unread records, even if `body` panics.
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

//! A global allocator that tracks the allocated memory and its peak.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Counts the allocated bytes, and their peak since [`CountingAllocator::begin`].
pub struct CountingAllocator {
    allocated: AtomicUsize,
    peak: AtomicUsize,
    /// The allocated bytes at the last call of `begin`.
    baseline: AtomicUsize,
    record: AtomicUsize,
}

impl CountingAllocator {
    pub const fn new() -> CountingAllocator {
        CountingAllocator {
            allocated: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            baseline: AtomicUsize::new(0),
            record: AtomicUsize::new(0),
        }
    }

    /// Begins a new measurement.
    pub fn begin(&self) {
        let allocated = self.allocated.load(Relaxed);
        self.baseline.store(allocated, Relaxed);
        self.peak.store(allocated, Relaxed);
    }

    /// The peak of the allocated bytes since `begin`, relative to the allocated bytes at `begin`.
    pub fn peak(&self) -> usize {
        self.peak.load(Relaxed) - self.baseline.load(Relaxed)
    }

    /// Whether `peak` exceeds the highest recorded peak by at least `step`; records it if so.
    pub fn is_record(&self, peak: usize, step: usize) -> bool {
        let is_record = peak >= self.record.load(Relaxed) + step;
        if is_record {
            self.record.store(peak, Relaxed);
        }
        is_record
    }

    fn add(&self, num_bytes: usize) {
        let allocated = self.allocated.fetch_add(num_bytes, Relaxed) + num_bytes;
        self.peak.fetch_max(allocated, Relaxed);
    }

    fn subtract(&self, num_bytes: usize) {
        self.allocated.fetch_sub(num_bytes, Relaxed);
    }
}

// Only a global allocator observes every allocation, and the trait is unsafe to implement.
// SAFETY: every call is forwarded unchanged to the system allocator, which fulfills the contract; the
// counters are atomics and allocate nothing.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.subtract(layout.size());
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both blocks are allocated while the content moves.
        self.add(new_size);
        let moved = unsafe { System.realloc(pointer, layout, new_size) };
        self.subtract(layout.size());
        moved
    }
}

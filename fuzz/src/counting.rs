//! The system's allocator, with an account of what is held at once.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Counts bytes that are held, and the most since [`Counting::begin`].
pub struct Counting {
    held: AtomicUsize,
    most: AtomicUsize,
    /// What was held when the input came.
    before: AtomicUsize,
    record: AtomicUsize,
}

impl Counting {
    pub const fn new() -> Counting {
        Counting {
            held: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            before: AtomicUsize::new(0),
            record: AtomicUsize::new(0),
        }
    }

    /// Counts from here.
    pub fn begin(&self) {
        let held = self.held.load(Relaxed);
        self.before.store(held, Relaxed);
        self.most.store(held, Relaxed);
    }

    /// The most that was held since, beyond what was held then.
    pub fn peak(&self) -> usize {
        self.most.load(Relaxed) - self.before.load(Relaxed)
    }

    /// Whether no input before took so much, by a step.
    pub fn is_record(&self, peak: usize, step: usize) -> bool {
        let is_record = peak >= self.record.load(Relaxed) + step;
        if is_record {
            self.record.store(peak, Relaxed);
        }
        is_record
    }

    fn take(&self, num_bytes: usize) {
        let held = self.held.fetch_add(num_bytes, Relaxed) + num_bytes;
        self.most.fetch_max(held, Relaxed);
    }

    fn give(&self, num_bytes: usize) {
        self.held.fetch_sub(num_bytes, Relaxed);
    }
}

// Only an allocator of its own sees every allocation, and the trait can only be implemented as unsafe.
// SAFETY: every call goes to the system's allocator as it came, which keeps the contract; the counters
// beside it are atomics and allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.take(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.take(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        self.give(layout.size());
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // While it is moved, both are held.
        self.take(new_size);
        let moved = unsafe { System.realloc(place, layout, new_size) };
        self.give(layout.size());
        moved
    }
}

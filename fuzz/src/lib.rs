//! The memory bound that all fuzz targets check: twice the input plus 64 MiB.

mod counting_allocator;

use counting_allocator::CountingAllocator;

#[global_allocator]
static MEMORY: CountingAllocator = CountingAllocator::new();

/// Memory that any input may take, in bytes.
const BASE: usize = 64 << 20;
/// A new peak is printed if it exceeds the last printed one by this many bytes.
const STEP: usize = 1 << 20;

/// Calls `read` on an input of `num_bytes`, and panics if it allocates more memory than the bound. Does not
/// count the allocations of C libraries.
pub fn bounded(num_bytes: usize, read: impl FnOnce()) {
    MEMORY.begin();
    read();
    let peak = MEMORY.peak();
    if MEMORY.is_record(peak, STEP) {
        eprintln!("peak: {} KiB for {num_bytes} bytes", peak >> 10);
    }
    let bound = 2 * num_bytes + BASE;
    assert!(
        peak <= bound,
        "an input of {num_bytes} bytes took {peak} bytes of memory: more than {bound}"
    );
}

//! What every target promises: no panic, and memory bounded by twice the input and 64 MiB more.

mod counting;

use counting::Counting;

#[global_allocator]
static MEMORY: Counting = Counting::new();

/// Memory that any input may take.
const BASE: usize = 64 << 20;
/// Steps in which a new peak is told.
const STEP: usize = 1 << 20;

/// Reads an input of `num_bytes`, and panics if that took more memory at once than promised. What C
/// libraries allocate is not counted.
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
        "{num_bytes} bytes took {peak} bytes of memory: more than {bound}"
    );
}

//! One clock for all ranks of a node.
//!
//! Ranks compare times with each other, so the clock shows wall time. A rank subtracts times, so the clock
//! never runs backwards: a process reads the wall time once and adds the monotonic clock to it.

use std::{
    sync::LazyLock,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

static ANCHOR: LazyLock<(u64, Instant)> = LazyLock::new(|| {
    let wall = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    (nanoseconds(wall), Instant::now())
});

/// The current time in nanoseconds since 1970.
pub fn now_ns() -> u64 {
    let (wall, then) = *ANCHOR;
    wall + nanoseconds(then.elapsed())
}

fn nanoseconds(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

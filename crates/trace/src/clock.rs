//! One clock for all ranks of a machine.
//!
//! Ranks compare times, so the clock reads as wall time; a rank subtracts times, so it never runs
//! backwards. Wall time is read once per process and carried on by the monotonic clock.

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

/// Nanoseconds since 1970 as this process counts them.
pub(crate) fn now_ns() -> u64 {
    let (wall, then) = *ANCHOR;
    wall + nanoseconds(then.elapsed())
}

fn nanoseconds(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

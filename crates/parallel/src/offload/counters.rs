//! Counters of offload I/O: bytes moved, and how much of the time overlapped computation.

use std::time::{Duration, Instant};

/// I/O counters since the file was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes read from the file.
    pub bytes_read: u64,
    /// Bytes written to the file.
    pub bytes_written: u64,
    /// Time during which a read or a write was running; concurrent ones count once.
    pub busy: Duration,
    /// Time that callers waited for reads and writes.
    pub waited: Duration,
}

impl Counters {
    /// The fraction of I/O time that overlapped computation, from 0 to 1; 1 if there was no I/O.
    pub fn overlap(&self) -> f64 {
        if self.waited >= self.busy {
            // A wait includes the wake-up, so it may be longer than the I/O itself.
            return if self.busy.is_zero() { 1.0 } else { 0.0 };
        }
        1.0 - self.waited.as_secs_f64() / self.busy.as_secs_f64()
    }
}

/// Measures the time during which at least one of several threads was working.
#[derive(Debug, Default)]
pub(super) struct Meter {
    num_working: usize,
    since: Option<Instant>,
    before: Duration,
}

impl Meter {
    pub(super) fn begin(&mut self, now: Instant) {
        self.num_working += 1;
        self.since.get_or_insert(now);
    }

    pub(super) fn end(&mut self, now: Instant) {
        self.num_working -= 1;
        if self.num_working == 0 {
            self.before = self.busy(now);
            self.since = None;
        }
    }

    pub(super) fn busy(&self, now: Instant) -> Duration {
        let current = self.since.map(|since| now.saturating_duration_since(since));
        self.before + current.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrent_work_counts_once() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut meter = Meter::default();
        meter.begin(at(0));
        meter.begin(at(10));
        meter.end(at(20));
        meter.end(at(30));
        meter.begin(at(50));
        assert_eq!(meter.busy(at(55)), Duration::from_millis(35));
        meter.end(at(60));
        assert_eq!(meter.busy(at(99)), Duration::from_millis(40));
    }

    #[test]
    fn overlap_is_the_fraction_without_waiting() {
        let of = |busy, waited| Counters {
            busy: Duration::from_millis(busy),
            waited: Duration::from_millis(waited),
            ..Counters::default()
        };
        assert_eq!(of(0, 0).overlap(), 1.0);
        assert_eq!(of(100, 25).overlap(), 0.75);
        assert_eq!(of(100, 101).overlap(), 0.0);
    }
}

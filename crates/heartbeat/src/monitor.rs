//! Polls the heartbeats of this node's ranks, and measures how long each made no progress.
//!
//! Only time in which the monitor itself ran counts: a launcher that was suspended, perhaps together with its whole
//! node, observed no hang meanwhile. The monitor uses its own clock only.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::{Heartbeat, HeartbeatMemory, RankStatus, Straggler, stragglers};

/// How often the monitor reads heartbeats.
pub const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The part of a longer gap between two polls in which the monitor is assumed to have run.
const MAX_POLL_GAP: Duration = Duration::from_secs(1);

/// How long a rank must be slow before it is reported as a straggler.
const STRAGGLER_AFTER: Duration = Duration::from_secs(10);

/// The status of this node's ranks since the workers were started.
#[derive(Debug)]
pub struct HeartbeatMonitor {
    last_poll: Instant,
    /// The time between the last two polls, as far as it counts.
    elapsed: Duration,
    statuses: BTreeMap<usize, RankStatus>,
    /// How long each slow rank has been slow, and whether it was reported.
    slow: BTreeMap<usize, (Duration, bool)>,
}

impl HeartbeatMonitor {
    /// A monitor that starts measuring now.
    pub fn new(now: Instant) -> HeartbeatMonitor {
        HeartbeatMonitor {
            last_poll: now,
            elapsed: Duration::ZERO,
            statuses: BTreeMap::new(),
            slow: BTreeMap::new(),
        }
    }

    /// When to poll again.
    pub fn next_poll(&self) -> Instant {
        self.last_poll + POLL_INTERVAL
    }

    /// Reads the heartbeats of these ranks.
    pub fn poll(
        &mut self,
        memory: &HeartbeatMemory,
        ranks: impl Iterator<Item = usize>,
        now: Instant,
    ) {
        let heartbeats = ranks.filter_map(|rank| memory.read(rank));
        self.record(heartbeats.collect(), now);
    }

    fn record(&mut self, heartbeats: Vec<Heartbeat>, now: Instant) {
        let elapsed = now.duration_since(self.last_poll).min(MAX_POLL_GAP);
        (self.last_poll, self.elapsed) = (now, elapsed);
        let before = std::mem::take(&mut self.statuses);
        let status = |heartbeat: Heartbeat| {
            let (mut stalled_for, mut silent_for) = (Duration::ZERO, Duration::ZERO);
            if let Some(last) = before.get(&heartbeat.rank) {
                let progress = |heartbeat: &Heartbeat| (heartbeat.stage, heartbeat.step);
                if progress(&last.heartbeat) == progress(&heartbeat) {
                    stalled_for = last.stalled_for + elapsed;
                }
                if last.heartbeat.written_ns == heartbeat.written_ns {
                    silent_for = last.silent_for + elapsed;
                }
            }
            let status = RankStatus {
                stalled_for,
                silent_for,
                heartbeat,
            };
            (status.heartbeat.rank, status)
        };
        self.statuses = heartbeats.into_iter().map(status).collect();
    }

    /// The status of every rank at the last poll.
    pub fn statuses(&self) -> Vec<RankStatus> {
        self.statuses.values().cloned().collect()
    }

    /// The ranks that have been reported as slow, and still are.
    pub fn slow_ranks(&self) -> Vec<usize> {
        let reported = self
            .slow
            .iter()
            .filter(|(_, (_, is_reported))| *is_reported);
        reported.map(|(rank, _)| *rank).collect()
    }

    /// Ranks that have been slow for some time and were not reported yet.
    pub fn new_stragglers(&mut self, all: &[RankStatus]) -> Vec<Straggler> {
        let slow = stragglers(all);
        let before = std::mem::take(&mut self.slow);
        let mut new = Vec::new();
        for straggler in slow {
            let (mut slow_for, mut is_reported) =
                before.get(&straggler.rank).copied().unwrap_or_default();
            slow_for += self.elapsed;
            if slow_for >= STRAGGLER_AFTER && !is_reported {
                is_reported = true;
                new.push(straggler);
            }
            self.slow.insert(straggler.rank, (slow_for, is_reported));
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{HangDetector, Stage, StepTimeStats};

    fn heartbeat(step: u64, written_ns: u64) -> Heartbeat {
        Heartbeat {
            stage: Stage::Stepping,
            step,
            written_ns,
            ..Heartbeat::default()
        }
    }

    fn times(monitor: &HeartbeatMonitor) -> (Duration, Duration) {
        let status = &monitor.statuses[&0];
        (status.stalled_for, status.silent_for)
    }

    #[test]
    fn time_without_progress_accumulates_until_there_is_progress() {
        let mut now = Instant::now();
        let mut monitor = HeartbeatMonitor::new(now);
        for written in 0..11 {
            monitor.record(vec![heartbeat(7, written)], now);
            now += POLL_INTERVAL;
        }
        assert_eq!(times(&monitor), (10 * POLL_INTERVAL, Duration::ZERO));
        monitor.record(vec![heartbeat(7, 10)], now);
        assert_eq!(times(&monitor), (11 * POLL_INTERVAL, POLL_INTERVAL));
        monitor.record(vec![heartbeat(8, 10)], now + POLL_INTERVAL);
        assert_eq!(times(&monitor), (Duration::ZERO, 2 * POLL_INTERVAL));
    }

    #[test]
    fn a_suspended_monitor_observes_no_hang() {
        let now = Instant::now();
        let mut monitor = HeartbeatMonitor::new(now);
        monitor.record(vec![heartbeat(7, 1)], now);
        monitor.record(vec![heartbeat(7, 1)], now + Duration::from_secs(3600));
        assert_eq!(times(&monitor), (MAX_POLL_GAP, MAX_POLL_GAP));
    }

    /// A rank and its launcher in simulated milliseconds.
    struct Simulation {
        start: Instant,
        next_heartbeat: u64,
        next_poll: u64,
        heartbeat: Heartbeat,
        step_times: StepTimeStats,
        monitor: HeartbeatMonitor,
    }

    impl Simulation {
        fn new(first_poll: u64) -> Simulation {
            let start = Instant::now();
            Simulation {
                start,
                next_heartbeat: 0,
                next_poll: first_poll,
                heartbeat: heartbeat(0, 0),
                step_times: StepTimeStats::default(),
                monitor: HeartbeatMonitor::new(start),
            }
        }

        /// Simulates until a time with the loop in one step; returns when the rank is found to hang, if it is.
        fn hung_before(&mut self, until: u64, step: u64, is_stopped: bool) -> Option<u64> {
            let detector = HangDetector {
                default_timeout: Duration::from_secs(1800),
            };
            let p99 = self.step_times.p99().map(|p99| p99.as_nanos() as u64);
            while self.next_heartbeat.min(self.next_poll) < until {
                if self.next_heartbeat <= self.next_poll {
                    if !is_stopped {
                        (self.heartbeat.step, self.heartbeat.written_ns) =
                            (step, self.next_heartbeat + 1);
                        self.heartbeat.p99_step_ns = p99;
                    }
                    self.next_heartbeat += 100;
                    continue;
                }
                let now = self.start + Duration::from_millis(self.next_poll);
                self.monitor.record(vec![self.heartbeat.clone()], now);
                let ranks = self.monitor.statuses();
                if !detector.hung_ranks(&ranks, &ranks).is_empty() {
                    return Some(self.next_poll);
                }
                self.next_poll += POLL_INTERVAL.as_millis() as u64;
            }
            None
        }
    }

    proptest! {
        /// Steps of up to 2.5 times the usual length are not hangs. A rank that then stops, or computes forever, is
        /// found within five seconds or three times the usual length, and not at once.
        #[test]
        fn hangs_are_distinguished_from_slow_steps(
            usual in 5u64..4000,
            steps in prop::collection::vec((0.5f64..1.0, 0u8..20), 10..60),
            first_poll in 1u64..100,
            is_stopped in any::<bool>(),
        ) {
            let mut simulation = Simulation::new(first_poll);
            let mut now = 0;
            for (number, (fraction, chance)) in steps.iter().enumerate() {
                let p99 = simulation.step_times.p99().map(|p99| p99.as_millis() as u64);
                let took = match p99 {
                    // Bounded: slow steps raise the p99, so they would otherwise grow without limit.
                    Some(p99) if *chance == 0 => p99.min(usual) * 5 / 2,
                    _ => (usual as f64 * fraction) as u64 + 1,
                };
                now += took;
                let hung = simulation.hung_before(now, number as u64, false);
                prop_assert_eq!(hung, None, "step {} of {} ms", number, took);
                simulation.step_times.record(Duration::from_millis(took), Duration::ZERO);
            }
            let p99 = simulation.step_times.p99().map_or(0, |p99| p99.as_millis() as u64);
            let limit = 5000.max(3 * p99);
            // A rank that stops has written a heartbeat of its step before.
            let mut last_heartbeat = now;
            if is_stopped {
                last_heartbeat += 200;
                prop_assert_eq!(simulation.hung_before(last_heartbeat, steps.len() as u64, false), None);
            }
            let found = simulation.hung_before(now + 2 * limit, steps.len() as u64, is_stopped);
            prop_assert!(found.is_some_and(|at| at > now + limit / 2 && at <= last_heartbeat + limit), "{:?}", found);
        }
    }
}

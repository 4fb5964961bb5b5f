//! Looking at the pulses of this machine's ranks, again and again.
//!
//! Time counts only as far as it was watched: a launcher that was itself stopped, with its whole machine
//! perhaps, has seen nobody hang meanwhile. No clock of anybody else is read.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use trainyard_trace::{Pulse, Sighting};

use crate::slow::{Slow, slow};

/// How often there is a look.
pub(crate) const LOOK: Duration = Duration::from_millis(100);

/// A longer time between two looks was not spent looking.
const LONGEST_LOOK: Duration = Duration::from_secs(1);

/// A rank that is slow for so long is told of.
const SLOW_FOR: Duration = Duration::from_secs(10);

/// What was seen of the ranks of one start.
#[derive(Debug)]
pub(crate) struct Vigil {
    looked: Instant,
    /// Watched between the last two looks.
    passed: Duration,
    seen: BTreeMap<usize, Sighting>,
    /// Since when a rank is seen to be slow, and whether that was told.
    slow: BTreeMap<usize, (Duration, bool)>,
}

impl Vigil {
    pub(crate) fn new(now: Instant) -> Vigil {
        Vigil {
            looked: now,
            passed: Duration::ZERO,
            seen: BTreeMap::new(),
            slow: BTreeMap::new(),
        }
    }

    /// When to look again.
    pub(crate) fn next(&self) -> Instant {
        self.looked + LOOK
    }

    /// Looks at the pulses of these ranks.
    pub(crate) fn look(&mut self, folder: &Path, ranks: impl Iterator<Item = usize>, now: Instant) {
        let pulses = ranks.filter_map(|rank| Pulse::read(folder, rank));
        self.see(pulses.collect(), now);
    }

    /// Takes note of what was read.
    fn see(&mut self, pulses: Vec<Pulse>, now: Instant) {
        let passed = now.duration_since(self.looked).min(LONGEST_LOOK);
        (self.looked, self.passed) = (now, passed);
        let before = std::mem::take(&mut self.seen);
        let sighting = |pulse: Pulse| {
            let (mut stalled, mut silent) = (Duration::ZERO, Duration::ZERO);
            if let Some(last) = before.get(&pulse.rank) {
                let at = |pulse: &Pulse| (pulse.stage, pulse.step);
                if at(&last.pulse) == at(&pulse) {
                    stalled = last.stalled + passed;
                }
                if last.pulse.written_ns == pulse.written_ns {
                    silent = last.silent + passed;
                }
            }
            let seen = Sighting {
                stalled,
                silent,
                pulse,
            };
            (seen.pulse.rank, seen)
        };
        self.seen = pulses.into_iter().map(sighting).collect();
    }

    /// What was seen of everybody.
    pub(crate) fn seen(&self) -> Vec<Sighting> {
        self.seen.values().cloned().collect()
    }

    /// Who has been slow for some time and was not told of yet.
    pub(crate) fn newly_slow(&mut self, all: &[Sighting]) -> Vec<Slow> {
        let found = slow(all);
        let before = std::mem::take(&mut self.slow);
        let mut news = Vec::new();
        for slow in found {
            let (mut lasted, mut told) = before.get(&slow.rank).copied().unwrap_or_default();
            lasted += self.passed;
            if lasted >= SLOW_FOR && !told {
                told = true;
                news.push(slow);
            }
            self.slow.insert(slow.rank, (lasted, told));
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use trainyard_trace::{Pace, Stage};

    use super::*;
    use crate::Patience;

    fn pulse(step: u64, written_ns: u64) -> Pulse {
        Pulse {
            stage: Stage::Stepping,
            step,
            written_ns,
            ..Pulse::default()
        }
    }

    fn times(vigil: &Vigil) -> (Duration, Duration) {
        let seen = &vigil.seen[&0];
        (seen.stalled, seen.silent)
    }

    #[test]
    fn time_without_progress_adds_up_and_progress_ends_it() {
        let mut now = Instant::now();
        let mut vigil = Vigil::new(now);
        for written in 0..11 {
            vigil.see(vec![pulse(7, written)], now);
            now += LOOK;
        }
        assert_eq!(times(&vigil), (10 * LOOK, Duration::ZERO));
        vigil.see(vec![pulse(7, 10)], now);
        assert_eq!(times(&vigil), (11 * LOOK, LOOK));
        vigil.see(vec![pulse(8, 10)], now + LOOK);
        assert_eq!(times(&vigil), (Duration::ZERO, 2 * LOOK));
    }

    #[test]
    fn who_did_not_look_has_seen_nobody_hang() {
        let now = Instant::now();
        let mut vigil = Vigil::new(now);
        vigil.see(vec![pulse(7, 1)], now);
        vigil.see(vec![pulse(7, 1)], now + Duration::from_secs(3600));
        assert_eq!(times(&vigil), (LONGEST_LOOK, LONGEST_LOOK));
    }

    /// A rank and its launcher, in milliseconds that nobody waits for.
    struct Watched {
        began: Instant,
        next_beat: u64,
        next_look: u64,
        pulse: Pulse,
        pace: Pace,
        vigil: Vigil,
    }

    impl Watched {
        fn new(first_look: u64) -> Watched {
            let began = Instant::now();
            Watched {
                began,
                next_beat: 0,
                next_look: first_look,
                pulse: pulse(0, 0),
                pace: Pace::default(),
                vigil: Vigil::new(began),
            }
        }

        /// Lets time pass until then, the loop being in a step; when it is blamed, if it is.
        fn blamed_before(&mut self, until: u64, step: u64, is_stopped: bool) -> Option<u64> {
            let patience = Patience {
                otherwise: Duration::from_secs(1800),
            };
            let p99 = self.pace.p99().map(|p99| p99.as_nanos() as u64);
            while self.next_beat.min(self.next_look) < until {
                if self.next_beat <= self.next_look {
                    if !is_stopped {
                        (self.pulse.step, self.pulse.written_ns) = (step, self.next_beat + 1);
                        self.pulse.p99_ns = p99;
                    }
                    self.next_beat += 100;
                    continue;
                }
                let now = self.began + Duration::from_millis(self.next_look);
                self.vigil.see(vec![self.pulse.clone()], now);
                let seen = self.vigil.seen();
                if !patience.blame(&seen, &seen).is_empty() {
                    return Some(self.next_look);
                }
                self.next_look += LOOK.as_millis() as u64;
            }
            None
        }
    }

    proptest! {
        /// With steps of two and a half times the usual length among them nobody is blamed; who then stops, or
        /// goes on for ever, is blamed within five seconds or three times the usual length, and not at once.
        #[test]
        fn hangs_are_told_from_slow_steps(
            usual in 5u64..4000,
            steps in prop::collection::vec((0.5f64..1.0, 0u8..20), 10..60),
            first_look in 1u64..100,
            is_stopped in any::<bool>(),
        ) {
            let mut watched = Watched::new(first_look);
            let mut now = 0;
            for (number, (part, chance)) in steps.iter().enumerate() {
                let p99 = watched.pace.p99().map(|p99| p99.as_millis() as u64);
                let took = match p99 {
                    // Bounded, since slow steps count as steps: they would grow and grow.
                    Some(p99) if *chance == 0 => p99.min(usual) * 5 / 2,
                    _ => (usual as f64 * part) as u64 + 1,
                };
                now += took;
                let blamed = watched.blamed_before(now, number as u64, false);
                prop_assert_eq!(blamed, None, "step {} of {} ms", number, took);
                watched.pace.saw(Duration::from_millis(took), Duration::ZERO);
            }
            let p99 = watched.pace.p99().map_or(0, |p99| p99.as_millis() as u64);
            let limit = 5000.max(3 * p99);
            // One that stops has told of its step before.
            let mut said = now;
            if is_stopped {
                said += 200;
                prop_assert_eq!(watched.blamed_before(said, steps.len() as u64, false), None);
            }
            let found = watched.blamed_before(now + 2 * limit, steps.len() as u64, is_stopped);
            prop_assert!(found.is_some_and(|at| at > now + limit / 2 && at <= said + limit), "{:?}", found);
        }
    }
}

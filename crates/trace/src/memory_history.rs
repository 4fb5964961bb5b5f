//! The allocated memory of each kind over time.

use std::cmp::Reverse;

use crate::{Allocation, MemoryKind};

/// Bytes of each kind, in the order of [`MemoryKind::ALL`].
pub type BytesByKind = [u64; MemoryKind::COUNT];

/// The allocated memory from a point in time until the next level begins.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MemoryLevel {
    /// When the level begins.
    pub at_ns: u64,
    /// Allocated bytes of each kind.
    pub bytes: BytesByKind,
}

impl MemoryLevel {
    /// Allocated bytes of all kinds.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

/// Every level of allocated memory between two points in time.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MemoryHistory {
    first: MemoryLevel,
    /// One for each allocation and release, in their order.
    changes: Vec<MemoryLevel>,
    ended_ns: u64,
}

impl MemoryHistory {
    /// The history from `started_ns` to `ended_ns`, given the bytes `base` that were allocated at the start and
    /// the later allocations and releases in order.
    pub fn new(
        base: BytesByKind,
        (started_ns, ended_ns): (u64, u64),
        allocations: &[Allocation],
    ) -> MemoryHistory {
        let first = MemoryLevel {
            at_ns: started_ns,
            bytes: base,
        };
        let changes = allocations.iter().scan(first, |level, change| {
            let bytes = &mut level.bytes[change.kind.index()];
            *bytes = bytes.saturating_add_signed(change.bytes);
            // Timestamps may go backwards; the order of the events counts.
            level.at_ns = level.at_ns.max(change.at_ns);
            Some(*level)
        });
        let changes: Vec<MemoryLevel> = changes.collect();
        let last_ns = changes.last().map_or(started_ns, |level| level.at_ns);
        MemoryHistory {
            first,
            changes,
            ended_ns: ended_ns.max(last_ns),
        }
    }

    /// All levels in chronological order: the first, and one for each change.
    pub fn levels(&self) -> impl Iterator<Item = &MemoryLevel> {
        std::iter::once(&self.first).chain(&self.changes)
    }

    /// The number of allocations and releases.
    pub fn num_changes(&self) -> usize {
        self.changes.len()
    }

    /// The level at the start.
    pub fn first(&self) -> &MemoryLevel {
        &self.first
    }

    /// The level at the end.
    pub fn last(&self) -> &MemoryLevel {
        self.changes.last().unwrap_or(&self.first)
    }

    /// When the last level ends.
    pub fn ended_ns(&self) -> u64 {
        self.ended_ns
    }

    /// The level with the highest total; the first one if there are several.
    pub fn peak(&self) -> &MemoryLevel {
        let first_of_highest =
            |(index, level): &(usize, &MemoryLevel)| (level.total(), Reverse(*index));
        let highest = self.levels().enumerate().max_by_key(first_of_highest);
        highest.map_or(&self.first, |(_, level)| level)
    }

    /// The peak of each kind; the peaks of different kinds may be at different times.
    pub fn peak_of_each(&self) -> BytesByKind {
        self.levels().fold(self.first.bytes, |highest, level| {
            std::array::from_fn(|kind| highest[kind].max(level.bytes[kind]))
        })
    }

    /// At most `max` levels (at least four) that preserve the shape of the curve. If there are more, divides
    /// the time into bins and keeps the highest, the lowest and the last level of each bin: no peak is lost,
    /// and the level throughout bins without changes is correct.
    pub fn downsampled(&self, max: usize) -> Vec<MemoryLevel> {
        if self.changes.len() < max {
            return self.levels().copied().collect();
        }
        let num_bins = (max.saturating_sub(1) / 3).max(1) as u128;
        let length = u128::from(self.ended_ns - self.first.at_ns).max(1);
        let bin = |level: &MemoryLevel| {
            let since = u128::from(level.at_ns - self.first.at_ns);
            (since * num_bins / length).min(num_bins - 1)
        };
        let bins = self.changes.chunk_by(|a, b| bin(a) == bin(b));
        std::iter::once(self.first)
            .chain(bins.flat_map(extremes))
            .collect()
    }
}

/// The highest, the lowest and the last level of a bin, in chronological order.
fn extremes(bin: &[MemoryLevel]) -> Vec<MemoryLevel> {
    let indices = 0..bin.len();
    let lowest = indices.clone().min_by_key(|&index| bin[index].total());
    let highest = indices
        .clone()
        .max_by_key(|&index| (bin[index].total(), Reverse(index)));
    let mut kept: Vec<usize> = [lowest, highest, indices.last()]
        .into_iter()
        .flatten()
        .collect();
    kept.sort_unstable();
    kept.dedup();
    kept.into_iter().map(|index| bin[index]).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn change(kind: MemoryKind, bytes: i64, at_ns: u64) -> Allocation {
        Allocation { kind, bytes, at_ns }
    }

    /// Random allocations and releases that never release more than is allocated.
    fn any_history() -> impl Strategy<Value = MemoryHistory> {
        let change = (0..MemoryKind::COUNT, -1000i64..1000, 0u64..50);
        let changes = prop::collection::vec(change, 0..300);
        (prop::array::uniform6(0u64..5000), changes, 0u64..100).prop_map(|(base, changes, rest)| {
            let (mut allocated, mut at_ns) = (base, 10);
            let mut allocations = Vec::new();
            for (index, bytes, later) in changes {
                let bytes = bytes.max(-(allocated[index] as i64));
                allocated[index] = allocated[index].saturating_add_signed(bytes);
                at_ns += later;
                allocations.push(change_of(index, bytes, at_ns));
            }
            MemoryHistory::new(base, (10, at_ns + rest), &allocations)
        })
    }

    fn change_of(index: usize, bytes: i64, at_ns: u64) -> Allocation {
        change(MemoryKind::ALL[index], bytes, at_ns)
    }

    #[test]
    fn levels_add_up() {
        use MemoryKind::{Activation, Gradient};
        let changes = [
            change(Activation, 100, 20),
            change(Gradient, 7, 30),
            change(Activation, -100, 25),
        ];
        let history = MemoryHistory::new([50, 3, 0, 0, 0, 0], (10, 28), &changes);
        let levels: Vec<_> = history.levels().map(|l| (l.at_ns, l.total())).collect();
        // The third event follows the second one, although its timestamp is earlier.
        assert_eq!(levels, [(10, 53), (20, 153), (30, 160), (30, 60)]);
        assert_eq!(history.peak().bytes, [50, 10, 0, 100, 0, 0]);
        assert_eq!(history.peak_of_each(), [50, 10, 0, 100, 0, 0]);
        assert_eq!(history.last().bytes, [50, 10, 0, 0, 0, 0]);
        assert_eq!(history.ended_ns(), 30);
    }

    #[test]
    fn a_step_without_changes_has_one_level() {
        let history = MemoryHistory::new([1; 6], (5, 9), &[]);
        assert_eq!(history.downsampled(4), [*history.first()]);
        assert_eq!(
            (history.peak(), history.last()),
            (history.first(), history.first())
        );
    }

    proptest! {
        #[test]
        fn downsampling_keeps_the_peak(history in any_history(), max in 4usize..100) {
            let sampled = history.downsampled(max);
            prop_assert!(sampled.len() <= max);
            prop_assert_eq!(sampled.iter().map(MemoryLevel::total).max(), Some(history.peak().total()));
            prop_assert!(sampled.contains(history.peak()));
        }

        #[test]
        fn downsampling_yields_a_subsequence(history in any_history(), max in 4usize..100) {
            let sampled = history.downsampled(max);
            let mut all = history.levels();
            // `any` advances the iterator, so each level is found after the previous one.
            prop_assert!(sampled.iter().all(|kept| all.any(|level| level == kept)));
            prop_assert_eq!(sampled.first(), Some(history.first()));
            prop_assert_eq!(sampled.last(), Some(history.last()));
            if history.num_changes() < max {
                prop_assert_eq!(sampled.len(), history.num_changes() + 1);
            }
        }

        /// Within one bin of every dropped level there is a kept level that is at least as high, and one that
        /// is at least as low: local peaks stay visible.
        #[test]
        fn downsampling_keeps_local_extremes(history in any_history(), max in 4usize..100) {
            let sampled = history.downsampled(max);
            let length = history.ended_ns() - history.first().at_ns;
            let width = length / ((max as u64 - 1) / 3) + 1;
            for level in history.levels() {
                let mut near = sampled.iter().filter(|kept| kept.at_ns.abs_diff(level.at_ns) <= width);
                prop_assert!(near.clone().any(|kept| kept.total() >= level.total()));
                prop_assert!(near.any(|kept| kept.total() <= level.total()));
            }
        }
    }
}

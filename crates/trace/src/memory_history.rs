//! How many bytes were held, of each kind, over time.

use std::cmp::Reverse;

use crate::{Allocation, MemoryKind};

/// Bytes of each kind, in the order of [`MemoryKind::ALL`].
pub type BytesByKind = [u64; MemoryKind::COUNT];

/// What was held from a moment on, until the next level begins.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MemoryLevel {
    /// The moment.
    pub at_ns: u64,
    /// Bytes held of each kind.
    pub held: BytesByKind,
}

impl MemoryLevel {
    /// Bytes held in all.
    pub fn total(&self) -> u64 {
        self.held.iter().sum()
    }
}

/// Every level of memory between two moments.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MemoryHistory {
    first: MemoryLevel,
    /// One for each allocation and release, in their order.
    changes: Vec<MemoryLevel>,
    ended_ns: u64,
}

impl MemoryHistory {
    /// What was held from `started_ns` to `ended_ns`, when `base` was held at first and then
    /// memory was taken and given back in this order.
    pub fn new(
        base: BytesByKind,
        (started_ns, ended_ns): (u64, u64),
        allocations: &[Allocation],
    ) -> MemoryHistory {
        let first = MemoryLevel {
            at_ns: started_ns,
            held: base,
        };
        let changes = allocations.iter().scan(first, |level, change| {
            let held = &mut level.held[change.kind.index()];
            *held = held.saturating_add_signed(change.bytes);
            // Clocks may be set back; what came later is drawn later.
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

    /// All levels in order of time: the first, and one for each change.
    pub fn levels(&self) -> impl Iterator<Item = &MemoryLevel> {
        std::iter::once(&self.first).chain(&self.changes)
    }

    /// How many times memory was taken or given back.
    pub fn num_changes(&self) -> usize {
        self.changes.len()
    }

    /// What was held at the beginning.
    pub fn first(&self) -> &MemoryLevel {
        &self.first
    }

    /// What was held in the end.
    pub fn last(&self) -> &MemoryLevel {
        self.changes.last().unwrap_or(&self.first)
    }

    /// When the last level ended.
    pub fn ended_ns(&self) -> u64 {
        self.ended_ns
    }

    /// The level at which most was held; the first of several.
    pub fn peak(&self) -> &MemoryLevel {
        let first_of_highest =
            |(index, level): &(usize, &MemoryLevel)| (level.total(), Reverse(*index));
        let highest = self.levels().enumerate().max_by_key(first_of_highest);
        highest.map_or(&self.first, |(_, level)| level)
    }

    /// The most that was held of each kind, each at a moment of its own.
    pub fn peak_of_each(&self) -> BytesByKind {
        self.levels().fold(self.first.held, |highest, level| {
            std::array::from_fn(|kind| highest[kind].max(level.held[kind]))
        })
    }

    /// At most `most` levels (four at least) that look like all of them. Where there are too many,
    /// time is cut into bins, and of each bin the highest, the lowest and the last level stay: no
    /// peak is lost, and what is held through bins without changes is right.
    pub fn thinned(&self, most: usize) -> Vec<MemoryLevel> {
        if self.changes.len() < most {
            return self.levels().copied().collect();
        }
        let num_bins = (most.saturating_sub(1) / 3).max(1) as u128;
        let length = u128::from(self.ended_ns - self.first.at_ns).max(1);
        let bin = |level: &MemoryLevel| {
            let since = u128::from(level.at_ns - self.first.at_ns);
            (since * num_bins / length).min(num_bins - 1)
        };
        let bins = self.changes.chunk_by(|a, b| bin(a) == bin(b));
        std::iter::once(self.first)
            .chain(bins.flat_map(outline))
            .collect()
    }
}

/// The highest, the lowest and the last level of a bin, in order of time.
fn outline(bin: &[MemoryLevel]) -> Vec<MemoryLevel> {
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

    /// Memory taken and given back at random, never more back than was taken.
    fn any_history() -> impl Strategy<Value = MemoryHistory> {
        let change = (0..MemoryKind::COUNT, -1000i64..1000, 0u64..50);
        let changes = prop::collection::vec(change, 0..300);
        (prop::array::uniform6(0u64..5000), changes, 0u64..100).prop_map(|(base, changes, rest)| {
            let (mut held, mut at_ns) = (base, 10);
            let mut allocations = Vec::new();
            for (index, bytes, later) in changes {
                let bytes = bytes.max(-(held[index] as i64));
                held[index] = held[index].saturating_add_signed(bytes);
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
        // The third came after the second, whatever the clock said.
        assert_eq!(levels, [(10, 53), (20, 153), (30, 160), (30, 60)]);
        assert_eq!(history.peak().held, [50, 10, 0, 100, 0, 0]);
        assert_eq!(history.peak_of_each(), [50, 10, 0, 100, 0, 0]);
        assert_eq!(history.last().held, [50, 10, 0, 0, 0, 0]);
        assert_eq!(history.ended_ns(), 30);
    }

    #[test]
    fn a_step_without_changes_has_one_level() {
        let history = MemoryHistory::new([1; 6], (5, 9), &[]);
        assert_eq!(history.thinned(4), [*history.first()]);
        assert_eq!(
            (history.peak(), history.last()),
            (history.first(), history.first())
        );
    }

    proptest! {
        #[test]
        fn thinning_keeps_the_peak(history in any_history(), most in 4usize..100) {
            let thinned = history.thinned(most);
            prop_assert!(thinned.len() <= most);
            prop_assert_eq!(thinned.iter().map(MemoryLevel::total).max(), Some(history.peak().total()));
            prop_assert!(thinned.contains(history.peak()));
        }

        #[test]
        fn thinning_only_leaves_out(history in any_history(), most in 4usize..100) {
            let thinned = history.thinned(most);
            let mut all = history.levels();
            // Each is found after the one before it.
            prop_assert!(thinned.iter().all(|kept| all.any(|level| level == kept)));
            prop_assert_eq!(thinned.first(), Some(history.first()));
            prop_assert_eq!(thinned.last(), Some(history.last()));
            if history.num_changes() < most {
                prop_assert_eq!(thinned.len(), history.num_changes() + 1);
            }
        }

        /// What is left out lies within one bin of something at least as high, and of something at
        /// least as low: so local peaks stay where a reader can tell them apart.
        #[test]
        fn thinning_keeps_local_extremes(history in any_history(), most in 4usize..100) {
            let thinned = history.thinned(most);
            let length = history.ended_ns() - history.first().at_ns;
            let width = length / ((most as u64 - 1) / 3) + 1;
            for level in history.levels() {
                let mut near = thinned.iter().filter(|kept| kept.at_ns.abs_diff(level.at_ns) <= width);
                prop_assert!(near.clone().any(|kept| kept.total() >= level.total()));
                prop_assert!(near.any(|kept| kept.total() <= level.total()));
            }
        }
    }
}

//! Sets of time intervals.
//!
//! Events overlap: collectives run concurrently, and waits are inside spans. So a report needs the length of
//! a union of intervals, not the sum of their durations.

/// A set of points in time, as sorted, non-empty and disjoint intervals in nanoseconds.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct IntervalSet(Vec<(u64, u64)>);

impl IntervalSet {
    /// The total duration of the set.
    pub fn duration(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// The intervals, in ascending order.
    pub fn intervals(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().copied()
    }

    /// The points in time that are in both sets.
    pub fn intersection(&self, other: &IntervalSet) -> IntervalSet {
        let (mut left, mut right) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut both = Vec::new();
        while let (Some(&&(a, b)), Some(&&(c, d))) = (left.peek(), right.peek()) {
            if a.max(c) < b.min(d) {
                both.push((a.max(c), b.min(d)));
            }
            // The interval that ends first overlaps nothing further.
            if b <= d {
                left.next()
            } else {
                right.next()
            };
        }
        IntervalSet(both)
    }

    /// The points in time of this set that are not in `other`.
    pub fn difference(&self, other: &IntervalSet) -> IntervalSet {
        self.intersection(&other.complement())
    }

    fn complement(&self) -> IntervalSet {
        let starts = std::iter::once(0).chain(self.0.iter().map(|&(_, end)| end));
        let ends = self
            .0
            .iter()
            .map(|&(start, _)| start)
            .chain(std::iter::once(u64::MAX));
        IntervalSet(
            starts
                .zip(ends)
                .filter(|(start, end)| start < end)
                .collect(),
        )
    }
}

/// Builds the union of intervals; an interval that ends before it starts is empty.
impl FromIterator<(u64, u64)> for IntervalSet {
    fn from_iter<I: IntoIterator<Item = (u64, u64)>>(intervals: I) -> IntervalSet {
        let mut sorted: Vec<(u64, u64)> = intervals
            .into_iter()
            .filter(|(start, end)| start < end)
            .collect();
        sorted.sort_unstable();
        let mut disjoint: Vec<(u64, u64)> = Vec::with_capacity(sorted.len());
        for (start, end) in sorted {
            match disjoint.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => disjoint.push((start, end)),
            }
        }
        IntervalSet(disjoint)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const END: u64 = 64;

    fn any_intervals() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0..END, 0..END), 0..12)
    }

    /// The same set as one flag per nanosecond.
    fn ticks(intervals: &[(u64, u64)]) -> Vec<bool> {
        (0..END)
            .map(|at| intervals.iter().any(|&(a, b)| a <= at && at < b))
            .collect()
    }

    fn zipped(a: &[bool], b: &[bool], f: impl Fn(bool, bool) -> bool) -> Vec<bool> {
        a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
    }

    proptest! {
        #[test]
        fn sets_agree_with_flags_per_nanosecond(a in any_intervals(), b in any_intervals()) {
            let (x, y) = (a.iter().copied().collect::<IntervalSet>(), b.iter().copied().collect());
            let (p, q) = (ticks(&a), ticks(&b));
            prop_assert_eq!(ticks(&x.0), p.clone());
            prop_assert_eq!(x.duration(), p.iter().filter(|&&is_in| is_in).count() as u64);
            prop_assert_eq!(ticks(&x.intersection(&y).0), zipped(&p, &q, |p, q| p && q));
            prop_assert_eq!(ticks(&x.difference(&y).0), zipped(&p, &q, |p, q| p && !q));
        }
    }
}

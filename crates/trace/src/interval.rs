//! Sets of moments.
//!
//! Times overlap: collectives run beside each other, waits lie inside spans. What is asked is never
//! the sum of durations but the length of a set, so the sets have their algebra here.

/// A set of moments: intervals that are sorted, not empty and apart.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Moments(Vec<(u64, u64)>);

impl Moments {
    /// How long the set is.
    pub fn length(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// The moments in both sets.
    pub fn and(&self, other: &Moments) -> Moments {
        let (mut left, mut right) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut both = Vec::new();
        while let (Some(&&(a, b)), Some(&&(c, d))) = (left.peek(), right.peek()) {
            if a.max(c) < b.min(d) {
                both.push((a.max(c), b.min(d)));
            }
            // What ends first meets nothing more.
            if b <= d {
                left.next()
            } else {
                right.next()
            };
        }
        Moments(both)
    }

    /// The moments of this set that are not in `other`.
    pub fn without(&self, other: &Moments) -> Moments {
        self.and(&other.complement())
    }

    fn complement(&self) -> Moments {
        let starts = std::iter::once(0).chain(self.0.iter().map(|&(_, end)| end));
        let ends = self
            .0
            .iter()
            .map(|&(start, _)| start)
            .chain(std::iter::once(u64::MAX));
        Moments(
            starts
                .zip(ends)
                .filter(|(start, end)| start < end)
                .collect(),
        )
    }
}

/// The union of any intervals; those that end before they start are empty.
impl FromIterator<(u64, u64)> for Moments {
    fn from_iter<I: IntoIterator<Item = (u64, u64)>>(intervals: I) -> Moments {
        let mut sorted: Vec<(u64, u64)> = intervals
            .into_iter()
            .filter(|(start, end)| start < end)
            .collect();
        sorted.sort_unstable();
        let mut apart: Vec<(u64, u64)> = Vec::with_capacity(sorted.len());
        for (start, end) in sorted {
            match apart.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => apart.push((start, end)),
            }
        }
        Moments(apart)
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

    /// The same set, moment by moment.
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
        fn sets_agree_with_counting_moments(a in any_intervals(), b in any_intervals()) {
            let (x, y) = (a.iter().copied().collect::<Moments>(), b.iter().copied().collect());
            let (p, q) = (ticks(&a), ticks(&b));
            prop_assert_eq!(ticks(&x.0), p.clone());
            prop_assert_eq!(x.length(), p.iter().filter(|&&held| held).count() as u64);
            prop_assert_eq!(ticks(&x.and(&y).0), zipped(&p, &q, |p, q| p && q));
            prop_assert_eq!(ticks(&x.without(&y).0), zipped(&p, &q, |p, q| p && !q));
        }
    }
}

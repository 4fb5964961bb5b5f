//! The policy of when a unit's parameters are gathered and released.

use trainyard_cost::Reshard;

/// Which units are gathered ahead, and which stay gathered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PrefetchPolicy {
    pub reshard: Reshard,
    /// Number of units gathered ahead.
    pub num_units: usize,
    pub overlap: bool,
}

impl PrefetchPolicy {
    /// The units to gather while unit `index` runs forward.
    pub fn forward(&self, index: usize, num_units: usize) -> impl Iterator<Item = usize> + use<> {
        index + 1..(index + 1 + self.num_ahead()).min(num_units)
    }

    /// The units to gather while unit `index` runs backward.
    pub fn backward(&self, index: usize) -> impl Iterator<Item = usize> + use<> {
        (index.saturating_sub(self.num_ahead())..index).rev()
    }

    /// The unit after `last`, the last one gathered ahead of `index`, in the same direction.
    pub fn next_after(&self, index: usize, last: usize, num_units: usize) -> Option<usize> {
        if last >= index {
            Some(last + 1).filter(|&next| next < num_units)
        } else {
            last.checked_sub(1)
        }
    }

    /// Whether a unit's parameters are released after its forward pass.
    pub fn releases(&self, is_last: bool, is_training: bool) -> bool {
        match self.reshard {
            _ if !is_training => true,
            Reshard::Default => !is_last,
            Reshard::Always => true,
            Reshard::Never => false,
        }
    }

    fn num_ahead(&self) -> usize {
        if self.overlap { self.num_units } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefetch_stays_within_the_model_and_stops_without_overlap() {
        let policy = PrefetchPolicy {
            reshard: Reshard::Default,
            num_units: 2,
            overlap: true,
        };
        assert!(policy.forward(0, 4).eq([1, 2]));
        assert!(policy.forward(2, 4).eq([3]));
        assert!(policy.forward(3, 4).eq([0usize; 0]));
        assert!(policy.backward(3).eq([2, 1]));
        assert!(policy.backward(1).eq([0]));
        assert!(policy.backward(0).eq([0usize; 0]));
        let without_overlap = PrefetchPolicy {
            overlap: false,
            ..policy
        };
        assert!(without_overlap.forward(0, 4).eq([0usize; 0]));
    }

    #[test]
    fn the_last_unit_stays_for_backward_by_default() {
        let releases = |reshard, is_last, is_training| {
            let policy = PrefetchPolicy {
                reshard,
                num_units: 1,
                overlap: true,
            };
            policy.releases(is_last, is_training)
        };
        assert!(releases(Reshard::Default, false, true));
        assert!(!releases(Reshard::Default, true, true));
        assert!(releases(Reshard::Always, true, true));
        assert!(!releases(Reshard::Never, false, true));
        assert!(releases(Reshard::Never, false, false));
    }
}

//! When a unit's parameters are gathered and when they go. Decided here, done elsewhere.

/// Whether parameters go after forward, as torchtitan's `fsdp_reshard_after_forward` has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reshard {
    /// All but the last unit's, which backward needs at once.
    #[default]
    Default,
    /// All.
    Always,
    /// None: they are gathered once a step and stay until backward is through with them.
    Never,
}

/// What is gathered ahead, and what is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Schedule {
    pub reshard: Reshard,
    pub prefetch: usize,
    pub overlap: bool,
}

impl Schedule {
    /// Units to gather while `index` runs forward.
    pub fn ahead(&self, index: usize, num_units: usize) -> impl Iterator<Item = usize> + use<> {
        index + 1..(index + 1 + self.num_ahead()).min(num_units)
    }

    /// Units to gather while `index` runs backward.
    pub fn behind(&self, index: usize) -> impl Iterator<Item = usize> + use<> {
        (index.saturating_sub(self.num_ahead())..index).rev()
    }

    /// The unit that is needed after `last`, which was started when `index` was needed: the one
    /// further on in the same direction.
    pub fn after(&self, index: usize, last: usize, num_units: usize) -> Option<usize> {
        match last >= index {
            true => Some(last + 1).filter(|&next| next < num_units),
            false => last.checked_sub(1),
        }
    }

    /// Whether a unit's parameters go after its forward pass.
    pub fn releases(&self, is_last: bool, is_training: bool) -> bool {
        match self.reshard {
            _ if !is_training => true,
            Reshard::Default => !is_last,
            Reshard::Always => true,
            Reshard::Never => false,
        }
    }

    fn num_ahead(&self) -> usize {
        match self.overlap {
            true => self.prefetch,
            false => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefetch_stays_within_the_model_and_stops_without_overlap() {
        let schedule = Schedule {
            reshard: Reshard::Default,
            prefetch: 2,
            overlap: true,
        };
        assert!(schedule.ahead(0, 4).eq([1, 2]));
        assert!(schedule.ahead(2, 4).eq([3]));
        assert!(schedule.ahead(3, 4).eq([0usize; 0]));
        assert!(schedule.behind(3).eq([2, 1]));
        assert!(schedule.behind(1).eq([0]));
        assert!(schedule.behind(0).eq([0usize; 0]));
        let alone = Schedule {
            overlap: false,
            ..schedule
        };
        assert!(alone.ahead(0, 4).eq([0usize; 0]));
    }

    #[test]
    fn the_last_unit_stays_for_backward_unless_told_otherwise() {
        let releases = |reshard, is_last, is_training| {
            let schedule = Schedule {
                reshard,
                prefetch: 1,
                overlap: true,
            };
            schedule.releases(is_last, is_training)
        };
        assert!(releases(Reshard::Default, false, true));
        assert!(!releases(Reshard::Default, true, true));
        assert!(releases(Reshard::Always, true, true));
        assert!(!releases(Reshard::Never, false, true));
        assert!(releases(Reshard::Never, false, false));
    }
}

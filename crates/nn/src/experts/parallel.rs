//! Expert parallelism: each rank of a group has some of the experts of every layer.

use std::fmt;
use std::ops::Range;

use tch::Tensor;
use trainyard_torch::{Group, meta};

use super::hierarchical::HierarchicalDispatcher;
use crate::{NnError, Result};

/// A synthetic imbalance of expert load: for dry runs, which have no values to route by, and to test imbalance in
/// real runs.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct SyntheticSkew {
    /// The exponent of a power law: expert `i`, from 1, gets rows in proportion to `i^-skew`. 0 is balanced.
    pub skew: f64,
}

impl SyntheticSkew {
    /// The bias to add to scores [tokens, experts] so that the first experts are preferred; `None` if balanced.
    pub(super) fn preference(self, scores: &Tensor) -> Result<Option<Tensor>> {
        if self.skew == 0.0 || meta::is_meta(scores) {
            return Ok(None);
        }
        let number = scores.size().last().copied().unwrap_or(0);
        let numbers = Tensor::f_arange_start(1, number + 1, (scores.kind(), scores.device()))?;
        Ok(Some(numbers.f_log()?.f_mul_scalar(-self.skew)?))
    }

    /// Divides `num_rows` rows among `num_experts`.
    pub fn counts(self, num_rows: i64, num_experts: usize) -> Vec<i64> {
        let weight = |number: usize| (number as f64).powf(-self.skew);
        let total: f64 = (1..=num_experts).map(weight).sum();
        let (mut cumulative, mut assigned) = (0.0, 0);
        (1..=num_experts)
            .map(|number| {
                cumulative += weight(number);
                // Round the cumulative sum, so that the counts add up.
                let upto = if number == num_experts {
                    num_rows
                } else {
                    (num_rows as f64 * cumulative / total).round() as i64
                };
                let count = upto - assigned;
                assigned = upto;
                count
            })
            .collect()
    }
}

/// The expert-parallel group, or none. Clones share it.
#[derive(Clone, Default)]
pub struct ExpertParallel {
    group: Option<Group>,
    hierarchical: Option<HierarchicalDispatcher>,
    sequence_group: Option<Group>,
    synthetic_skew: SyntheticSkew,
}

impl ExpertParallel {
    /// No expert parallelism: every rank has all experts.
    pub fn disabled() -> ExpertParallel {
        ExpertParallel::default()
    }

    /// Shards the experts of a layer over `group`; the ranks of `sequence_group` have other tokens of the same
    /// sequences.
    pub fn new(group: &Group, sequence_group: &Group) -> ExpertParallel {
        let if_several = |group: &Group| (group.size() > 1).then(|| group.clone());
        ExpertParallel {
            group: if_several(group),
            hierarchical: None,
            sequence_group: if_several(sequence_group),
            synthetic_skew: SyntheticSkew::default(),
        }
    }

    /// Dispatches tokens hierarchically: `within` are the ranks of this node, and `across` the ranks with the same
    /// local index on other nodes. A token is then sent to a node once, however many of its experts are there.
    #[must_use]
    pub fn hierarchical(self, within: &Group, across: &Group) -> ExpertParallel {
        let hierarchical = HierarchicalDispatcher::new(within, across);
        ExpertParallel {
            hierarchical: Some(hierarchical),
            ..self
        }
    }

    /// Sets a synthetic imbalance of expert load.
    #[must_use]
    pub fn with_synthetic_skew(self, synthetic_skew: SyntheticSkew) -> ExpertParallel {
        ExpertParallel {
            synthetic_skew,
            ..self
        }
    }

    /// The number of expert-parallel ranks.
    pub fn size(&self) -> usize {
        self.group.as_ref().map_or(1, Group::size)
    }

    /// The group, if there are several ranks.
    pub(crate) fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// The hierarchical dispatcher, if tokens are dispatched across nodes first.
    pub(super) fn hierarchical_dispatcher(&self) -> Option<&HierarchicalDispatcher> {
        self.hierarchical.as_ref()
    }

    /// The ranks with other tokens of the same sequences, if there are any.
    pub(crate) fn sequence_group(&self) -> Option<&Group> {
        self.sequence_group.as_ref()
    }

    pub(crate) fn synthetic_skew(&self) -> SyntheticSkew {
        self.synthetic_skew
    }

    /// This rank's range of `num_experts`, which must be divisible by the number of ranks.
    pub(crate) fn shard_range(&self, what: &str, num_experts: usize) -> Result<Range<usize>> {
        if !num_experts.is_multiple_of(self.size()) {
            return Err(NnError::NotDivisible {
                what: what.to_owned(),
                length: num_experts,
                num_ranks: self.size(),
            });
        }
        let each = num_experts / self.size();
        let index = self.group.as_ref().map_or(0, Group::index);
        Ok(index * each..(index + 1) * each)
    }
}

impl fmt::Debug for ExpertParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExpertParallel({})", self.size())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn counts_add_up(rows in 0i64..100_000, experts in 1usize..300, skew in 0.0f64..3.0) {
            let counts = SyntheticSkew { skew }.counts(rows, experts);
            prop_assert_eq!(counts.len(), experts);
            prop_assert_eq!(counts.iter().sum::<i64>(), rows);
            prop_assert!(counts.iter().all(|&count| count >= 0));
        }
    }

    #[test]
    fn zero_skew_is_balanced_and_a_positive_one_decreases() {
        assert_eq!(SyntheticSkew::default().counts(12, 4), [3, 3, 3, 3]);
        let counts = SyntheticSkew { skew: 1.0 }.counts(25, 4);
        assert_eq!(counts, [12, 6, 4, 3]);
    }
}

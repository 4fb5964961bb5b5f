//! Expert parallelism: ranks that have different experts of every layer.

use std::fmt;
use std::ops::Range;

use tch::Tensor;
use trainyard_torch::{Group, meta};

use super::machines::Machines;
use crate::{NnError, Result};

/// How unequally the rows of a batch spread over experts: in a dry run, where no number is known, and in
/// others where it is to be tried.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Spread {
    /// How unequal: an expert gets rows in proportion to one over its number (from one) to this power.
    /// With zero all get as many.
    pub skew: f64,
}

impl Spread {
    /// What is added to scores [tokens, experts] so that the first experts are preferred; none where all
    /// are equal.
    pub(super) fn preference(self, scores: &Tensor) -> Result<Option<Tensor>> {
        if self.skew == 0.0 || meta::is_meta(scores) {
            return Ok(None);
        }
        let number = scores.size().last().copied().unwrap_or(0);
        let numbers = Tensor::f_arange_start(1, number + 1, (scores.kind(), scores.device()))?;
        Ok(Some(numbers.f_log()?.f_mul_scalar(-self.skew)?))
    }

    /// How many of `num_rows` rows each of `num_experts` gets; they add up.
    pub fn counts(self, num_rows: i64, num_experts: usize) -> Vec<i64> {
        let weight = |number: usize| (number as f64).powf(-self.skew);
        let total: f64 = (1..=num_experts).map(weight).sum();
        let (mut seen, mut given) = (0.0, 0);
        (1..=num_experts)
            .map(|number| {
                seen += weight(number);
                // Rounding the sum so far, so that the last sum is all.
                let upto = match number == num_experts {
                    true => num_rows,
                    false => (num_rows as f64 * seen / total).round() as i64,
                };
                let count = upto - given;
                given = upto;
                count
            })
            .collect()
    }
}

/// The ranks that have different experts, or this rank alone with all. Cloning shares them.
#[derive(Clone, Default)]
pub struct ExpertParallel {
    group: Option<Group>,
    machines: Option<Machines>,
    sharers: Option<Group>,
    spread: Spread,
}

impl ExpertParallel {
    /// All experts are here.
    pub fn alone() -> ExpertParallel {
        ExpertParallel::default()
    }

    /// The experts of a layer are divided over `group`; the ranks of `sharers` have other tokens of the
    /// same sequences.
    pub fn new(group: &Group, sharers: &Group) -> ExpertParallel {
        let several = |group: &Group| (group.size() > 1).then(|| group.clone());
        ExpertParallel {
            group: several(group),
            machines: None,
            sharers: several(sharers),
            spread: Spread::default(),
        }
    }

    /// The same ranks on several machines: those `within` this one, and those `across` machines that stand
    /// where this rank does. A token then goes to a machine once, however many of its experts are there.
    #[must_use]
    pub fn on_machines(self, within: &Group, across: &Group) -> ExpertParallel {
        let machines = Machines::new(within, across);
        ExpertParallel {
            machines: Some(machines),
            ..self
        }
    }

    /// How rows spread over experts in a dry run.
    #[must_use]
    pub fn with_spread(self, spread: Spread) -> ExpertParallel {
        ExpertParallel { spread, ..self }
    }

    /// How many ranks have different experts.
    pub fn size(&self) -> usize {
        self.group.as_ref().map_or(1, Group::size)
    }

    /// Those ranks, where there are several.
    pub(crate) fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// The machines they are on, where tokens go from machine to machine first.
    pub(super) fn machines(&self) -> Option<&Machines> {
        self.machines.as_ref()
    }

    /// The ranks that have other tokens of the same sequences, where there are.
    pub(crate) fn sharers(&self) -> Option<&Group> {
        self.sharers.as_ref()
    }

    pub(crate) fn spread(&self) -> Spread {
        self.spread
    }

    /// This rank's interval of `num_experts`, which the ranks must be able to share evenly.
    pub(crate) fn share(&self, what: &str, num_experts: usize) -> Result<Range<usize>> {
        if !num_experts.is_multiple_of(self.size()) {
            return Err(NnError::Uneven {
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
        fn spreads_add_up(rows in 0i64..100_000, experts in 1usize..300, skew in 0.0f64..3.0) {
            let counts = Spread { skew }.counts(rows, experts);
            prop_assert_eq!(counts.len(), experts);
            prop_assert_eq!(counts.iter().sum::<i64>(), rows);
            prop_assert!(counts.iter().all(|&count| count >= 0));
        }
    }

    #[test]
    fn an_equal_spread_is_equal_and_a_skewed_one_falls() {
        assert_eq!(Spread::default().counts(12, 4), [3, 3, 3, 3]);
        let counts = Spread { skew: 1.0 }.counts(25, 4);
        assert_eq!(counts, [12, 6, 4, 3]);
    }
}

//! Activation checkpointing: activations are recomputed in backward instead of stored.
//!
//! A [`RecomputePlan`] decides for which units, and for how much of them. The first and the last unit are never
//! recomputed: the output of the last is needed at once, and the input of the first is small.

use std::ops::Range;
use std::rc::Rc;

use tch::Tensor;
use trainyard_nn::{Model, UnitCall, UnitHooks, recompute};

/// How much of a unit is recomputed in backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recompute {
    /// Nothing: all activations are stored.
    #[default]
    None,
    /// Attention, with its norm and projections; activations of the feed-forward part are stored.
    Attention,
    /// Everything: only the unit's input is stored.
    Full,
}

/// The recomputation of every unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecomputePlan(Vec<Recompute>);

impl RecomputePlan {
    /// A plan without recomputation.
    pub fn none(num_units: usize) -> RecomputePlan {
        RecomputePlan(vec![Recompute::None; num_units])
    }

    /// Recomputes every `k`th block, starting with the first.
    pub fn every(k: usize, what: Recompute, num_units: usize) -> RecomputePlan {
        let mut plan = RecomputePlan::none(num_units);
        for decision in plan.blocks().iter_mut().step_by(k.max(1)) {
            *decision = what;
        }
        plan
    }

    /// All candidate plans, from the fastest to the one with the least memory: attention of more and more blocks,
    /// then more and more full blocks. Blocks are taken from the front, because a late block would be recomputed
    /// while most other blocks still store their activations.
    pub fn candidates(num_units: usize) -> Vec<RecomputePlan> {
        let mut plan = RecomputePlan::none(num_units);
        let mut plans = vec![plan.clone()];
        for what in [Recompute::Attention, Recompute::Full] {
            for index in 0..plan.blocks().len() {
                plan.blocks()[index] = what;
                plans.push(plan.clone());
            }
        }
        plans
    }

    /// The plan for a range of units, as a plan of its own.
    #[must_use]
    pub fn slice(&self, units: Range<usize>) -> RecomputePlan {
        RecomputePlan(units.map(|index| self.of(index)).collect())
    }

    /// The recomputation of a unit.
    pub fn of(&self, index: usize) -> Recompute {
        self.0.get(index).copied().unwrap_or_default()
    }

    /// Whether nothing is recomputed.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|what| *what == Recompute::None)
    }

    /// The number of units whose attention is recomputed, and of those recomputed in full.
    pub fn counts(&self) -> (usize, usize) {
        let count = |what| self.0.iter().filter(|w| **w == what).count();
        (count(Recompute::Attention), count(Recompute::Full))
    }

    fn blocks(&mut self) -> &mut [Recompute] {
        let end = self.0.len().saturating_sub(1).max(1);
        self.0.get_mut(1..end).unwrap_or_default()
    }
}

/// Finds the first of `plans`, ordered by decreasing memory, whose peak memory is at most `budget`, by binary
/// search. `Err` contains the smallest peak that was found.
pub fn fit_to_budget<E>(
    plans: &[RecomputePlan],
    budget: u64,
    mut peak_of: impl FnMut(&RecomputePlan) -> Result<u64, E>,
) -> Result<Result<usize, u64>, E> {
    let (mut low, mut high) = (0, plans.len());
    let mut smallest = u64::MAX;
    while low < high {
        let middle = (low + high) / 2;
        let peak = peak_of(&plans[middle])?;
        smallest = smallest.min(peak);
        if peak <= budget {
            high = middle
        } else {
            low = middle + 1
        }
    }
    Ok(if low < plans.len() {
        Ok(low)
    } else {
        Err(smallest)
    })
}

/// Unit hooks that apply a plan. They must be the innermost hooks.
pub struct RecomputeHooks {
    model: Rc<dyn Model>,
    plan: RecomputePlan,
}

impl RecomputeHooks {
    /// Hooks for `model`, which must be the model that the strategy wraps.
    pub fn new(model: Rc<dyn Model>, plan: RecomputePlan) -> RecomputeHooks {
        RecomputeHooks { model, plan }
    }
}

impl UnitHooks for RecomputeHooks {
    fn configure(&self, call: &mut UnitCall) {
        call.context.recompute_attention = self.plan.of(call.index) == Recompute::Attention;
    }

    fn wrap(
        &self,
        call: &UnitCall,
        x: &Tensor,
        forward: &dyn Fn(&Tensor) -> trainyard_nn::Result<Tensor>,
    ) -> trainyard_nn::Result<Tensor> {
        if self.plan.of(call.index) != Recompute::Full {
            return forward(x);
        }
        let (model, call) = (Rc::clone(&self.model), call.clone());
        recompute(
            x,
            Rc::new(move |x| model.units()[call.index].forward(x, &call.context)),
        )
    }

    fn needs_backward(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_and_the_last_unit_are_not_recomputed() {
        let plan = RecomputePlan::every(2, Recompute::Full, 7);
        let found: Vec<_> = (0..7).map(|i| plan.of(i) == Recompute::Full).collect();
        assert_eq!(found, [false, true, false, true, false, true, false]);
        assert_eq!(plan.counts(), (0, 3));
        for num_units in 0..3 {
            assert!(RecomputePlan::every(1, Recompute::Full, num_units).is_empty());
        }
        assert_eq!(RecomputePlan::candidates(5).len(), 1 + 2 * 3);
    }

    proptest! {
        #[test]
        fn the_fastest_plan_that_fits_is_found(
            num_units in 2usize..20, budget in 0u64..1200, saved in 1u64..40,
        ) {
            let plans = RecomputePlan::candidates(num_units);
            let peak = |plan: &RecomputePlan| {
                let (some, all) = plan.counts();
                1000 - saved * (some as u64 + 2 * all as u64).min(25)
            };
            let found = fit_to_budget(&plans, budget, |plan| Ok::<_, ()>(peak(plan))).unwrap();
            let expected = plans.iter().position(|plan| peak(plan) <= budget);
            prop_assert_eq!(found.ok(), expected);
            if let Err(smallest) = found {
                prop_assert_eq!(Some(smallest), plans.iter().map(peak).min());
            }
        }
    }
}

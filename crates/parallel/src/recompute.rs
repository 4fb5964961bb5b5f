//! Recomputation: activations that backward needs are made again instead of kept.
//!
//! Which units, and how much of them, is a [`RecomputePlan`]; the first and the last unit are always
//! kept, since their outputs are needed at once or their inputs are small.

use std::ops::Range;
use std::rc::Rc;

use tch::Tensor;
use trainyard_nn::{Intercept, Model, UnitCall, recomputed};

/// What of a unit is made again in backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recompute {
    /// Nothing: everything is kept.
    #[default]
    Nothing,
    /// Attention, with its norm and projections; the feed-forward part is kept.
    Attention,
    /// Everything: only the unit's input is kept.
    Everything,
}

/// One decision per unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecomputePlan(Vec<Recompute>);

impl RecomputePlan {
    /// Keeps everything.
    pub fn nothing(num_units: usize) -> RecomputePlan {
        RecomputePlan(vec![Recompute::Nothing; num_units])
    }

    /// Every `k`th block from the first on: all of them with 1.
    pub fn every(k: usize, what: Recompute, num_units: usize) -> RecomputePlan {
        let mut plan = RecomputePlan::nothing(num_units);
        for decision in plan.blocks().iter_mut().step_by(k.max(1)) {
            *decision = what;
        }
        plan
    }

    /// All plans worth trying, from the fastest to the one that keeps least: attention of more and
    /// more blocks, then all of more and more blocks. A block recomputed late in the model is made
    /// again while most others are still kept, so blocks are taken from the front.
    pub fn from_fast_to_small(num_units: usize) -> Vec<RecomputePlan> {
        let mut plan = RecomputePlan::nothing(num_units);
        let mut plans = vec![plan.clone()];
        for what in [Recompute::Attention, Recompute::Everything] {
            for index in 0..plan.blocks().len() {
                plan.blocks()[index] = what;
                plans.push(plan.clone());
            }
        }
        plans
    }

    /// The decisions for some of the units, as if they were a model of their own.
    #[must_use]
    pub fn part(&self, units: Range<usize>) -> RecomputePlan {
        RecomputePlan(units.map(|index| self.of(index)).collect())
    }

    /// The decision for a unit.
    pub fn of(&self, index: usize) -> Recompute {
        self.0.get(index).copied().unwrap_or_default()
    }

    /// Whether anything is recomputed.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|what| *what == Recompute::Nothing)
    }

    /// How many units are recomputed in part and in full.
    pub fn counts(&self) -> (usize, usize) {
        let count = |what| self.0.iter().filter(|w| **w == what).count();
        (count(Recompute::Attention), count(Recompute::Everything))
    }

    fn blocks(&mut self) -> &mut [Recompute] {
        let end = self.0.len().saturating_sub(1).max(1);
        self.0.get_mut(1..end).unwrap_or_default()
    }
}

/// The first plan, of those from fast to small, whose peak is at most `budget`; peaks are asked for
/// as few times as a search by halves needs. `Err` holds the peak of the smallest plan.
pub fn fit<E>(
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
        match peak <= budget {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    Ok(match low < plans.len() {
        true => Ok(low),
        false => Err(smallest),
    })
}

/// Carries a plan out at the call site of units. To be the innermost interceptor.
pub struct Recomputing {
    model: Rc<dyn Model>,
    plan: RecomputePlan,
}

impl Recomputing {
    /// For this model, which the strategy wraps too.
    pub fn new(model: Rc<dyn Model>, plan: RecomputePlan) -> Recomputing {
        Recomputing { model, plan }
    }
}

impl Intercept for Recomputing {
    fn adjust(&self, call: &mut UnitCall) {
        call.context.recompute_attention = self.plan.of(call.index) == Recompute::Attention;
    }

    fn wrap(
        &self,
        call: &UnitCall,
        x: &Tensor,
        forward: &dyn Fn(&Tensor) -> trainyard_nn::Result<Tensor>,
    ) -> trainyard_nn::Result<Tensor> {
        if self.plan.of(call.index) != Recompute::Everything {
            return forward(x);
        }
        let (model, call) = (Rc::clone(&self.model), call.clone());
        recomputed(
            x,
            Rc::new(move |x| model.units()[call.index].forward(x, &call.context)),
        )
    }

    fn watches_backward(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_and_the_last_unit_are_kept() {
        let plan = RecomputePlan::every(2, Recompute::Everything, 7);
        let found: Vec<_> = (0..7)
            .map(|i| plan.of(i) == Recompute::Everything)
            .collect();
        assert_eq!(found, [false, true, false, true, false, true, false]);
        assert_eq!(plan.counts(), (0, 3));
        for num_units in 0..3 {
            assert!(RecomputePlan::every(1, Recompute::Everything, num_units).is_empty());
        }
        assert_eq!(RecomputePlan::from_fast_to_small(5).len(), 1 + 2 * 3);
    }

    proptest! {
        #[test]
        fn the_fastest_plan_that_fits_is_found(
            num_units in 2usize..20, budget in 0u64..1200, saved in 1u64..40,
        ) {
            let plans = RecomputePlan::from_fast_to_small(num_units);
            let peak = |plan: &RecomputePlan| {
                let (some, all) = plan.counts();
                1000 - saved * (some as u64 + 2 * all as u64).min(25)
            };
            let found = fit(&plans, budget, |plan| Ok::<_, ()>(peak(plan))).unwrap();
            let expected = plans.iter().position(|plan| peak(plan) <= budget);
            prop_assert_eq!(found.ok(), expected);
            if let Err(smallest) = found {
                prop_assert_eq!(Some(smallest), plans.iter().map(peak).min());
            }
        }
    }
}

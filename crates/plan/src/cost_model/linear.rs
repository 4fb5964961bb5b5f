//! A linear cost model: a fixed cost per call plus a cost per unit of work.

use serde::{Deserialize, Serialize};

/// Seconds of a call: `fixed + per_unit * units`. Neither coefficient is negative.
#[derive(Copy, Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct LinearCost {
    /// Seconds of a call without work (its latency).
    pub fixed: f64,
    /// Seconds per unit of work.
    pub per_unit: f64,
}

/// A call longer than this, in seconds, is dominated by work.
const LONG_CALL: f64 = 1e-5;

/// A call with fewer units than this is dominated by its fixed cost.
const MANY_UNITS: f64 = 1e4;

/// Calls of the same size that were timed together.
#[derive(Copy, Clone, Debug, PartialEq)]
pub(super) struct Sample {
    /// Units of work per call.
    pub units: f64,
    /// Seconds per call.
    pub seconds: f64,
    /// Number of calls.
    pub count: f64,
}

impl LinearCost {
    /// Seconds of a call with `units` units of work.
    pub fn at(&self, units: f64) -> f64 {
        self.fixed + self.per_unit * units
    }

    /// Fits a line by weighted least squares on relative errors, so a small call counts as much as a large one.
    pub(super) fn fit(samples: &[Sample]) -> LinearCost {
        let weight = |s: &Sample| s.count / s.seconds.max(1e-9).powi(2);
        let sum = |of: fn(&Sample) -> f64| samples.iter().map(|s| weight(s) * of(s)).sum::<f64>();
        let total = sum(|_| 1.0);
        if total == 0.0 {
            return LinearCost::default();
        }
        let (x, y) = (sum(|s| s.units), sum(|s| s.seconds));
        let (xx, xy) = (sum(|s| s.units * s.units), sum(|s| s.units * s.seconds));
        let flat = LinearCost {
            fixed: y / total,
            per_unit: 0.0,
        };
        let proportional = LinearCost {
            fixed: 0.0,
            per_unit: if xx > 0.0 { xy / xx } else { 0.0 },
        };
        let spread = xx - x * x / total;
        if spread <= 1e-9 * xx || xx == 0.0 {
            // One size determines no slope: attribute a long call to its work and a short one to its fixed cost.
            let is_work = x / total > MANY_UNITS && flat.fixed > LONG_CALL;
            return if is_work { proportional } else { flat };
        }
        let per_unit = (xy - x * y / total) / spread;
        let fixed = (y - per_unit * x) / total;
        match (fixed < 0.0, per_unit < 0.0) {
            (_, true) => flat,
            (true, false) => proportional,
            (false, false) => LinearCost { fixed, per_unit },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_fit_recovers_a_straight_line(
            fixed in 1e-6f64..1e-3,
            per_unit in 1e-12f64..1e-8,
            sizes in prop::collection::btree_set(1u32..1_000_000, 2..8),
        ) {
            let cost = LinearCost { fixed, per_unit };
            let samples: Vec<Sample> = sizes
                .iter()
                .map(|&units| Sample {
                    units: f64::from(units),
                    seconds: cost.at(f64::from(units)),
                    count: 3.0,
                })
                .collect();
            let found = LinearCost::fit(&samples);
            for sample in samples {
                let off = found.at(sample.units) / sample.seconds - 1.0;
                prop_assert!(off.abs() < 1e-3, "{found:?} {cost:?}");
            }
        }
    }

    #[test]
    fn a_single_size_counts_as_work_if_it_takes_long() {
        let one = |seconds| {
            let units = 1e6;
            let count = 2.0;
            LinearCost::fit(&[Sample {
                units,
                seconds,
                count,
            }])
        };
        assert_eq!(one(1e-6).at(5e5), 1e-6);
        assert!((one(1e-2).at(5e5) - 5e-3).abs() < 1e-9);
    }

    #[test]
    fn a_decreasing_cost_becomes_constant() {
        let sample = |units, seconds| Sample {
            units,
            seconds,
            count: 1.0,
        };
        let cost = LinearCost::fit(&[sample(1.0, 2.0), sample(2.0, 1.0)]);
        assert_eq!(cost.per_unit, 0.0);
    }
}

//! Seconds as a straight line over work: what a call costs in any case, and what it costs per unit.

use serde::{Deserialize, Serialize};

/// Seconds of a call: `each + per_unit * units`. Neither is negative.
#[derive(Copy, Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Line {
    /// Seconds of a call without work.
    pub each: f64,
    /// Seconds per unit of work.
    pub per_unit: f64,
}

/// Seconds beyond which a call does more than being called.
const LONG: f64 = 1e-5;

/// Units below which it does nothing else.
const MANY: f64 = 1e4;

/// Calls that were timed together.
#[derive(Copy, Clone, Debug, PartialEq)]
pub(super) struct Sample {
    /// Units of work of one call.
    pub units: f64,
    /// Seconds of one call.
    pub seconds: f64,
    /// How many calls.
    pub count: f64,
}

impl Line {
    /// Seconds of a call with that much work.
    pub fn at(&self, units: f64) -> f64 {
        self.each + self.per_unit * units
    }

    /// The line nearest to all samples, relative to their size: a small call counts as much as a large one.
    pub(super) fn through(samples: &[Sample]) -> Line {
        let weight = |s: &Sample| s.count / s.seconds.max(1e-9).powi(2);
        let sum = |of: fn(&Sample) -> f64| samples.iter().map(|s| weight(s) * of(s)).sum::<f64>();
        let total = sum(|_| 1.0);
        if total == 0.0 {
            return Line::default();
        }
        let (x, y) = (sum(|s| s.units), sum(|s| s.seconds));
        let (xx, xy) = (sum(|s| s.units * s.units), sum(|s| s.units * s.seconds));
        let flat = Line {
            each: y / total,
            per_unit: 0.0,
        };
        let proportional = Line {
            each: 0.0,
            per_unit: if xx > 0.0 { xy / xx } else { 0.0 },
        };
        let spread = xx - x * x / total;
        if spread <= 1e-9 * xx || xx == 0.0 {
            // One size tells no slope: what takes long is taken to work, what does not only to be called.
            let works = x / total > MANY && flat.each > LONG;
            return if works { proportional } else { flat };
        }
        let per_unit = (xy - x * y / total) / spread;
        let each = (y - per_unit * x) / total;
        match (each < 0.0, per_unit < 0.0) {
            (_, true) => flat,
            (true, false) => proportional,
            (false, false) => Line { each, per_unit },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_straight_line_is_found_again(
            each in 1e-6f64..1e-3,
            per_unit in 1e-12f64..1e-8,
            sizes in prop::collection::btree_set(1u32..1_000_000, 2..8),
        ) {
            let line = Line { each, per_unit };
            let samples: Vec<Sample> = sizes
                .iter()
                .map(|&units| Sample {
                    units: f64::from(units),
                    seconds: line.at(f64::from(units)),
                    count: 3.0,
                })
                .collect();
            let found = Line::through(&samples);
            for sample in samples {
                let off = found.at(sample.units) / sample.seconds - 1.0;
                prop_assert!(off.abs() < 1e-3, "{found:?} {line:?}");
            }
        }
    }

    #[test]
    fn one_size_is_work_if_it_takes_long() {
        let one = |seconds| {
            let units = 1e6;
            let count = 2.0;
            Line::through(&[Sample {
                units,
                seconds,
                count,
            }])
        };
        assert_eq!(one(1e-6).at(5e5), 1e-6);
        assert!((one(1e-2).at(5e5) - 5e-3).abs() < 1e-9);
    }

    #[test]
    fn what_grows_smaller_is_taken_to_be_flat() {
        let sample = |units, seconds| Sample {
            units,
            seconds,
            count: 1.0,
        };
        let line = Line::through(&[sample(1.0, 2.0), sample(2.0, 1.0)]);
        assert_eq!(line.per_unit, 0.0);
    }
}

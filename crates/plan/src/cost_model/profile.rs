//! The profile of a node: linear costs of operators and collectives, fitted to measurements.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use trainyard_trace::Calls;

use super::linear::{LinearCost, Sample};
use super::sync_points::{CommSample, StragglerWait, collectives, straggler_wait};

/// Steps of one size that a rank ran alone, as `trainyard-engine bench operators` prints them.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct ProfiledSteps {
    /// Seconds of a step.
    pub step_seconds: f64,
    /// Number of steps that the calls were counted over.
    pub num_steps: u64,
    /// The operators of these steps.
    pub operators: Vec<Calls>,
}

/// Why a profile cannot be built or used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Not the output of the engine.
    #[error("cannot parse the measurements: {0}")]
    Syntax(#[from] serde_json::Error),
    /// There are no measurements.
    #[error("no measurements: {0} is empty")]
    Empty(&'static str),
    /// An invalid pipeline schedule.
    #[error(transparent)]
    Schedule(#[from] trainyard_schedule::ScheduleError),
}

/// A node's measured costs, with as many ranks running as the job will have.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct NodeProfile {
    /// Number of ranks that ran during the measurement.
    pub num_ranks: usize,
    /// Costs of operators by name: per floating-point operation for matrix products, per element for others.
    pub operators: BTreeMap<String, OperatorCost>,
    /// Costs of collectives, per byte that a rank sends.
    pub collectives: BTreeMap<String, LinearCost>,
    /// The wait for stragglers at synchronization points.
    pub straggler_wait: StragglerWait,
    /// Host seconds between two operators.
    pub host_gap: f64,
    /// The cost per element assumed for operators that were not measured.
    pub default_cost: LinearCost,
}

/// The cost of an operator: measured sizes, and a line to interpolate between them.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct OperatorCost {
    /// Whether units are floating-point operations; elements otherwise.
    pub over_flops: bool,
    /// Seconds over those units.
    #[serde(flatten)]
    pub cost: LinearCost,
    /// Floating-point operations, elements and seconds per call, for every measured size.
    pub samples: Vec<(u64, u64, f64)>,
}

impl OperatorCost {
    /// Seconds of these calls: those of the nearest measured size, scaled by the fitted line.
    pub fn seconds(&self, calls: &Calls) -> f64 {
        let wanted = units(calls, self.over_flops);
        let work =
            |sample: &(u64, u64, f64)| if self.over_flops { sample.0 } else { sample.1 } as f64;
        let distance = |sample: &(u64, u64, f64)| {
            let times = (work(sample).max(1.0) / wanted.max(1.0)).ln().abs();
            (times, sample.1.abs_diff(calls.elements))
        };
        let nearest = self.samples.iter().min_by(|a, b| {
            distance(a)
                .partial_cmp(&distance(b))
                .unwrap_or(Ordering::Equal)
        });
        let cost = self.cost.at(wanted);
        let one = match nearest.map(|sample| (sample.2, self.cost.at(work(sample)))) {
            Some((seconds, there)) if there > 0.0 => seconds * cost / there,
            _ => cost,
        };
        calls.count as f64 * one
    }
}

fn units(calls: &Calls, over_flops: bool) -> f64 {
    if over_flops {
        calls.flops as f64
    } else {
        calls.elements as f64
    }
}

impl NodeProfile {
    /// Fits the profile to steps of several sizes and a table of collectives.
    pub fn fit(
        num_ranks: usize,
        steps: &[ProfiledSteps],
        comm: &[CommSample],
    ) -> Result<NodeProfile, ProfileError> {
        if steps.iter().all(|step| step.operators.is_empty()) {
            return Err(ProfileError::Empty("the list of operators"));
        }
        if comm.is_empty() && num_ranks > 1 {
            return Err(ProfileError::Empty("the table of collectives"));
        }
        let operators = operators(steps);
        Ok(NodeProfile {
            num_ranks,
            default_cost: median_cost(&operators),
            operators,
            collectives: collectives(comm),
            straggler_wait: straggler_wait(comm),
            host_gap: host_gap(steps),
        })
    }
}

fn operators(steps: &[ProfiledSteps]) -> BTreeMap<String, OperatorCost> {
    let mut groups: BTreeMap<&str, Vec<&Calls>> = BTreeMap::new();
    for calls in steps.iter().flat_map(|step| &step.operators) {
        groups.entry(&calls.name).or_default().push(calls);
    }
    let rate = |calls: &[&Calls]| {
        let over_flops = calls.iter().any(|calls| calls.flops > 0);
        OperatorCost {
            over_flops,
            cost: LinearCost::fit(&samples(calls.iter().copied(), over_flops)),
            samples: sizes(calls),
        }
    };
    groups
        .iter()
        .map(|(name, calls)| ((*name).to_owned(), rate(calls)))
        .collect()
}

/// Seconds per call of every size, over all steps.
fn sizes(calls: &[&Calls]) -> Vec<(u64, u64, f64)> {
    let mut groups: BTreeMap<(u64, u64), (u64, u64)> = BTreeMap::new();
    for calls in calls {
        let (count, self_ns) = groups.entry((calls.flops, calls.elements)).or_default();
        *count += calls.count;
        *self_ns += calls.self_ns;
    }
    let one = |(count, self_ns): (u64, u64)| self_ns as f64 / 1e9 / count.max(1) as f64;
    let groups = groups.into_iter();
    groups
        .map(|((flops, elements), total)| (flops, elements, one(total)))
        .collect()
}

/// The median cost of element-wise operators.
fn median_cost(operators: &BTreeMap<String, OperatorCost>) -> LinearCost {
    let elementwise = operators.values().filter(|operator| !operator.over_flops);
    let costs: Vec<LinearCost> = elementwise
        .map(|operator| operator.cost)
        .filter(|cost| cost.per_unit > 0.0)
        .collect();
    let median = |of: fn(&LinearCost) -> f64| {
        let mut all: Vec<f64> = costs.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or(0.0)
    };
    LinearCost {
        fixed: median(|cost| cost.fixed),
        per_unit: median(|cost| cost.per_unit),
    }
}

fn samples<'a>(calls: impl Iterator<Item = &'a Calls>, over_flops: bool) -> Vec<Sample> {
    calls
        .map(|calls| Sample {
            units: units(calls, over_flops),
            seconds: calls.self_ns as f64 / 1e9 / calls.count.max(1) as f64,
            count: calls.count as f64,
        })
        .collect()
}

/// The host time between operators: step time minus operator time, per operator.
fn host_gap(steps: &[ProfiledSteps]) -> f64 {
    let (mut seconds, mut count) = (0.0, 0.0);
    for step in steps {
        let within: u64 = step.operators.iter().map(|calls| calls.self_ns).sum();
        seconds += step.num_steps as f64 * step.step_seconds - within as f64 / 1e9;
        count += step.operators.iter().map(|c| c.count).sum::<u64>() as f64;
    }
    (seconds / f64::max(count, 1.0)).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(name: &str, flops: u64, elements: u64, count: u64, self_ns: u64) -> Calls {
        Calls {
            name: name.to_owned(),
            flops,
            elements,
            count,
            self_ns,
            ..Calls::default()
        }
    }

    #[test]
    fn a_profile_reproduces_its_measurements() {
        let operators = vec![
            calls("aten::mm", 1000, 10, 4, 4_000),
            calls("aten::mm", 4000, 40, 1, 4_000),
            calls("aten::add", 0, 100, 5, 500),
        ];
        let steps = [ProfiledSteps {
            step_seconds: 9.5e-6,
            num_steps: 1,
            operators: operators.clone(),
        }];
        let profile = NodeProfile::fit(1, &steps, &[]).unwrap();
        let seconds: f64 = operators
            .iter()
            .map(|calls| profile.operators[&calls.name].seconds(calls))
            .sum();
        assert!((seconds - 8.5e-6).abs() < 1e-9, "{seconds}");
        assert!((profile.host_gap - 1e-7).abs() < 1e-12);
    }
}

//! What was seen of operators, as lines, and the machine that is all of what was seen.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use trainyard_trace::Calls;

use super::line::{Line, Sample};
use super::meetings::{Message, Waits, collectives, waits};

/// Steps of one size that a rank computed alone, as `trainyard-engine bench operators` prints them.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Stepped {
    /// Seconds of a step.
    pub step_seconds: f64,
    /// How many steps the calls are of.
    pub num_steps: u64,
    /// What ran in them.
    pub operators: Vec<Calls>,
}

/// Why a measurement is of no use.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// Not what the engine prints.
    #[error("what was measured cannot be read: {0}")]
    Syntax(#[from] serde_json::Error),
    /// Nothing in it.
    #[error("nothing was measured: {0} is empty")]
    Empty(&'static str),
    /// A pipeline that cannot be followed.
    #[error(transparent)]
    Schedule(#[from] trainyard_schedule::ScheduleError),
}

/// A machine as it was measured with as many ranks at work as it will have.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Machine {
    /// Ranks that were at work.
    pub num_ranks: usize,
    /// Operators that multiply, over floating-point operations; the others over elements.
    pub operators: BTreeMap<String, Rate>,
    /// Collectives between ranks that compute, over the bytes that a rank sends.
    pub collectives: BTreeMap<String, Line>,
    /// What ranks lose when they meet.
    pub waits: Waits,
    /// Seconds between two operators, which the program spends itself.
    pub between: f64,
    /// What is taken for operators that were not seen: over elements.
    pub unseen: Line,
}

/// An operator: the sizes that were seen, and a line for all others.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Rate {
    /// Whether units are floating-point operations.
    pub over_flops: bool,
    /// Seconds over those units.
    #[serde(flatten)]
    pub line: Line,
    /// Operations, elements and seconds of one call, for every size there was.
    pub seen: Vec<(u64, u64, f64)>,
}

impl Rate {
    /// Seconds of all these calls: those of the nearest size that was seen, as much longer as the line says.
    pub fn seconds(&self, calls: &Calls) -> f64 {
        let wanted = units(calls, self.over_flops);
        let work = |seen: &(u64, u64, f64)| if self.over_flops { seen.0 } else { seen.1 } as f64;
        let far = |seen: &(u64, u64, f64)| {
            let times = (work(seen).max(1.0) / wanted.max(1.0)).ln().abs();
            (times, seen.1.abs_diff(calls.elements))
        };
        let nearest = self
            .seen
            .iter()
            .min_by(|a, b| far(a).partial_cmp(&far(b)).unwrap_or(Ordering::Equal));
        let line = self.line.at(wanted);
        let one = match nearest.map(|seen| (seen.2, self.line.at(work(seen)))) {
            Some((seconds, there)) if there > 0.0 => seconds * line / there,
            _ => line,
        };
        calls.count as f64 * one
    }
}

fn units(calls: &Calls, over_flops: bool) -> f64 {
    match over_flops {
        true => calls.flops as f64,
        false => calls.elements as f64,
    }
}

impl Machine {
    /// From steps of several sizes and a table of collectives.
    pub fn fit(
        num_ranks: usize,
        steps: &[Stepped],
        messages: &[Message],
    ) -> Result<Machine, MachineError> {
        if steps.iter().all(|step| step.operators.is_empty()) {
            return Err(MachineError::Empty("the list of operators"));
        }
        if messages.is_empty() && num_ranks > 1 {
            return Err(MachineError::Empty("the table of collectives"));
        }
        let operators = operators(steps);
        Ok(Machine {
            num_ranks,
            unseen: usual(&operators),
            operators,
            collectives: collectives(messages),
            waits: waits(messages),
            between: between(steps),
        })
    }
}

fn operators(steps: &[Stepped]) -> BTreeMap<String, Rate> {
    let mut alike: BTreeMap<&str, Vec<&Calls>> = BTreeMap::new();
    for calls in steps.iter().flat_map(|step| &step.operators) {
        alike.entry(&calls.name).or_default().push(calls);
    }
    let rate = |calls: &[&Calls]| {
        let over_flops = calls.iter().any(|calls| calls.flops > 0);
        Rate {
            over_flops,
            line: Line::through(&samples(calls.iter().copied(), over_flops)),
            seen: sizes(calls),
        }
    };
    alike
        .iter()
        .map(|(name, calls)| ((*name).to_owned(), rate(calls)))
        .collect()
}

/// Seconds of a call of every size, over all steps in which it was seen.
fn sizes(calls: &[&Calls]) -> Vec<(u64, u64, f64)> {
    let mut alike: BTreeMap<(u64, u64), (u64, u64)> = BTreeMap::new();
    for calls in calls {
        let (count, self_ns) = alike.entry((calls.flops, calls.elements)).or_default();
        *count += calls.count;
        *self_ns += calls.self_ns;
    }
    let one = |(count, self_ns): (u64, u64)| self_ns as f64 / 1e9 / count.max(1) as f64;
    let alike = alike.into_iter();
    alike
        .map(|((flops, elements), total)| (flops, elements, one(total)))
        .collect()
}

/// What passing over elements usually costs: the middle one of all operators that do so.
fn usual(operators: &BTreeMap<String, Rate>) -> Line {
    let passes = operators.values().filter(|rate| !rate.over_flops);
    let lines: Vec<Line> = passes
        .map(|rate| rate.line)
        .filter(|line| line.per_unit > 0.0)
        .collect();
    let middle = |of: fn(&Line) -> f64| {
        let mut all: Vec<f64> = lines.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or(0.0)
    };
    Line {
        each: middle(|line| line.each),
        per_unit: middle(|line| line.per_unit),
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

/// What is left of a step when its operators are taken away, shared by them.
fn between(steps: &[Stepped]) -> f64 {
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
        }
    }

    #[test]
    fn a_machine_prices_what_it_was_measured_with() {
        let operators = vec![
            calls("aten::mm", 1000, 10, 4, 4_000),
            calls("aten::mm", 4000, 40, 1, 4_000),
            calls("aten::add", 0, 100, 5, 500),
        ];
        let steps = [Stepped {
            step_seconds: 9.5e-6,
            num_steps: 1,
            operators: operators.clone(),
        }];
        let machine = Machine::fit(1, &steps, &[]).unwrap();
        let seconds: f64 = operators
            .iter()
            .map(|calls| machine.operators[&calls.name].seconds(calls))
            .sum();
        assert!((seconds - 8.5e-6).abs() < 1e-9, "{seconds}");
        assert!((machine.between - 1e-7).abs() < 1e-12);
    }
}

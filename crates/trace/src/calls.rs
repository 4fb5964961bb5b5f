//! Operator calls grouped by name and size, from which the planner prices a dry run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Operator;
use crate::self_time::with_self_ns;

/// All calls of one operator with the same amount of work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calls {
    /// The operator's name.
    pub name: String,
    /// Floating-point operations per call.
    pub flops: u64,
    /// Total number of elements of the input tensors per call.
    pub elements: u64,
    /// The number of calls.
    pub count: u64,
    /// The self time of all calls in nanoseconds: without the operators that they call.
    pub self_ns: u64,
}

/// Groups `operators` by name and size.
pub fn calls(operators: &[Operator]) -> Vec<Calls> {
    let mut groups: BTreeMap<(&str, u64, u64), (u64, u64)> = BTreeMap::new();
    for (operator, self_ns) in with_self_ns(operators) {
        let key = (operator.name.as_str(), operator.flops, elements(operator));
        let (count, total_ns) = groups.entry(key).or_default();
        *count += 1;
        *total_ns += self_ns;
    }
    groups
        .into_iter()
        .map(|((name, flops, elements), (count, self_ns))| Calls {
            name: name.to_owned(),
            flops,
            elements,
            count,
            self_ns,
        })
        .collect()
}

fn elements(operator: &Operator) -> u64 {
    let of_shape = |shape: &Vec<i64>| shape.iter().map(|&d| d.max(0) as u64).product::<u64>();
    operator.shapes.iter().map(of_shape).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_the_same_size_are_grouped() {
        let operator = |rows, started_ns, ended_ns| Operator {
            name: "aten::add".to_owned(),
            shapes: vec![vec![rows, 4], vec![4]],
            started_ns,
            ended_ns,
            flops: 0,
            thread: 0,
        };
        let found = calls(&[operator(2, 0, 5), operator(2, 5, 8), operator(3, 8, 9)]);
        let found: Vec<_> = found
            .iter()
            .map(|c| (c.elements, c.count, c.self_ns))
            .collect();
        assert_eq!(found, [(12, 2, 8), (16, 1, 1)]);
    }
}

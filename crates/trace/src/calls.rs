//! Operator calls grouped by name and size, from which the planner prices a dry run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Operator;
use crate::kernel_bytes::{KernelBytes, kernel_bytes};
use crate::self_time::{SelfCall, self_calls};

/// All calls of one operator with the same amount of work.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calls {
    /// The operator's name.
    pub name: String,
    /// Floating-point operations per call.
    pub flops: u64,
    /// Total number of elements of the input tensors per call.
    pub elements: u64,
    /// What its kernel reads and writes per call; none for operators that only call others or create views.
    pub kernel: Option<KernelBytes>,
    /// The number of calls.
    pub count: u64,
    /// The self time of all calls in nanoseconds: without the operators that they call.
    pub self_ns: u64,
}

/// Groups `operators` by name and size.
pub fn calls(operators: &[Operator]) -> Vec<Calls> {
    let mut groups = BTreeMap::new();
    let calls = self_calls(operators);
    for (call, kernel) in calls.iter().zip(kernels(&calls)) {
        let operator = call.operator;
        let key = (
            operator.name.as_str(),
            operator.flops,
            elements(operator),
            kernel,
        );
        let (count, total_ns) = groups.entry(key).or_insert((0, 0));
        *count += 1;
        *total_ns += call.self_ns;
    }
    groups
        .into_iter()
        .map(
            |((name, flops, elements, kernel), (count, self_ns))| Calls {
                name: name.to_owned(),
                flops,
                elements,
                kernel,
                count,
                self_ns,
            },
        )
        .collect()
}

/// The kernel of every call: the innermost call that has one, because an operator that calls others does its work
/// through them. An operator on a list of tensors is one kernel on a GPU, and calls others elsewhere; one that counts
/// floating-point operations is a kernel as well.
fn kernels(calls: &[SelfCall<'_>]) -> Vec<Option<KernelBytes>> {
    let is_whole =
        |operator: &Operator| operator.flops > 0 || operator.name.starts_with("aten::_foreach_");
    let mut is_part = vec![false; calls.len()];
    for (index, call) in calls.iter().enumerate() {
        is_part[index] = call
            .caller
            .is_some_and(|caller| is_part[caller] || is_whole(calls[caller].operator));
    }
    let mut kernels = vec![None; calls.len()];
    let mut calls_kernels = vec![false; calls.len()];
    for (index, call) in calls.iter().enumerate().rev() {
        if !calls_kernels[index] && !is_part[index] {
            kernels[index] = kernel_bytes(call.operator);
        }
        if let Some(caller) = call.caller {
            calls_kernels[caller] |= calls_kernels[index] || kernels[index].is_some();
        }
    }
    kernels
}

fn elements(operator: &Operator) -> u64 {
    let of_shape = |shape: &Vec<i64>| shape.iter().map(|&d| d.max(0) as u64).product::<u64>();
    operator.shapes.iter().map(of_shape).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operator(name: &str, rows: i64, started_ns: u64, ended_ns: u64) -> Operator {
        Operator {
            name: name.to_owned(),
            shapes: vec![vec![rows, 4], vec![4]],
            input_bytes: 4 * (rows as u64 * 4 + 4),
            output_bytes: 4 * rows as u64 * 4,
            started_ns,
            ended_ns,
            flops: 0,
            thread: 0,
        }
    }

    #[test]
    fn calls_of_the_same_size_are_grouped() {
        let add = |rows, started_ns, ended_ns| operator("aten::add", rows, started_ns, ended_ns);
        let found = calls(&[add(2, 0, 5), add(2, 5, 8), add(3, 8, 9)]);
        let found: Vec<_> = found
            .iter()
            .map(|c| (c.elements, c.count, c.self_ns))
            .collect();
        assert_eq!(found, [(12, 2, 8), (16, 1, 1)]);
    }

    #[test]
    fn only_the_innermost_operator_has_a_kernel() {
        let found = calls(&[
            operator("aten::linear", 2, 0, 9),
            operator("aten::addmm", 2, 1, 8),
            operator("aten::empty", 2, 3, 4),
        ]);
        let lists = calls(&[
            operator("aten::_foreach_mul_", 2, 0, 9),
            operator("aten::mul_", 2, 1, 8),
        ]);
        let has_kernel: Vec<bool> = lists.iter().map(|c| c.kernel.is_some()).collect();
        assert_eq!(has_kernel, [true, false]);
        let kernels: Vec<_> = found.iter().map(|c| (c.name.as_str(), c.kernel)).collect();
        let addmm = KernelBytes {
            read: 48,
            written: 32,
        };
        assert_eq!(
            kernels,
            [
                ("aten::addmm", Some(addmm)),
                ("aten::empty", None),
                ("aten::linear", None)
            ]
        );
    }
}

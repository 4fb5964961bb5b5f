//! Self times of operators: the time spent in an operator, without the operators that it calls.

use std::collections::BTreeMap;

use crate::Operator;

/// The total of all calls of one operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SelfTime {
    /// The number of calls.
    pub count: u64,
    /// The self time in nanoseconds.
    pub self_ns: u64,
    /// The floating-point operations.
    pub flops: u64,
}

/// An operator call without the operators that it calls.
pub(crate) struct SelfCall<'a> {
    pub operator: &'a Operator,
    /// The self time in nanoseconds.
    pub self_ns: u64,
    /// The index of the call that it is part of. Callers come before callees.
    pub caller: Option<usize>,
}

/// Every operator call with its self time.
pub(crate) fn self_calls(operators: &[Operator]) -> Vec<SelfCall<'_>> {
    let mut ordered: Vec<&Operator> = operators.iter().collect();
    // Callers before callees: they start earlier, or at the same time and end later.
    ordered.sort_by_key(|o| (o.thread, o.started_ns, u64::MAX - o.ended_ns));
    let mut timed: Vec<SelfCall<'_>> = Vec::with_capacity(ordered.len());
    let mut callers: Vec<usize> = Vec::new();
    for operator in ordered {
        while callers.last().is_some_and(|&index| {
            let caller = timed[index].operator;
            caller.thread != operator.thread || caller.ended_ns <= operator.started_ns
        }) {
            callers.pop();
        }
        if let Some(&index) = callers.last() {
            let self_ns = &mut timed[index].self_ns;
            *self_ns = self_ns.saturating_sub(operator.duration_ns());
        }
        let caller = callers.last().copied();
        callers.push(timed.len());
        timed.push(SelfCall {
            operator,
            self_ns: operator.duration_ns(),
            caller,
        });
    }
    timed
}

/// The self times by operator name, the longest first.
pub fn self_times(operators: &[Operator]) -> Vec<(String, SelfTime)> {
    let mut by_name: BTreeMap<&str, SelfTime> = BTreeMap::new();
    for call in self_calls(operators) {
        let time = by_name.entry(&call.operator.name).or_default();
        time.count += 1;
        time.self_ns += call.self_ns;
        time.flops += call.operator.flops;
    }
    let mut times: Vec<(String, SelfTime)> = by_name
        .into_iter()
        .map(|(name, time)| (name.to_owned(), time))
        .collect();
    times.sort_by_key(|(_, time)| u64::MAX - time.self_ns);
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operator(name: &str, started_ns: u64, ended_ns: u64) -> Operator {
        Operator {
            name: name.to_owned(),
            shapes: Vec::new(),
            input_bytes: 0,
            output_bytes: 0,
            started_ns,
            ended_ns,
            flops: 1,
            thread: 0,
        }
    }

    #[test]
    fn self_time_excludes_callees() {
        let times = self_times(&[
            operator("inner", 2, 8),
            operator("outer", 0, 10),
            operator("inner", 10, 11),
        ]);
        let found: Vec<(&str, u64, u64)> = times
            .iter()
            .map(|(n, t)| (n.as_str(), t.count, t.self_ns))
            .collect();
        assert_eq!(found, [("inner", 2, 7), ("outer", 1, 4)]);
    }
}

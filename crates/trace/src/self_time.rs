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

/// Every operator call with its self time in nanoseconds.
pub(crate) fn with_self_ns(operators: &[Operator]) -> Vec<(&Operator, u64)> {
    let mut ordered: Vec<&Operator> = operators.iter().collect();
    // Callers before callees: they start earlier, or at the same time and end later.
    ordered.sort_by_key(|o| (o.thread, o.started_ns, u64::MAX - o.ended_ns));
    let mut timed: Vec<(&Operator, u64)> = Vec::with_capacity(ordered.len());
    let mut callers: Vec<usize> = Vec::new();
    for operator in ordered {
        while callers.last().is_some_and(|&index| {
            let caller = timed[index].0;
            caller.thread != operator.thread || caller.ended_ns <= operator.started_ns
        }) {
            callers.pop();
        }
        if let Some(&index) = callers.last() {
            let self_ns = &mut timed[index].1;
            *self_ns = self_ns.saturating_sub(operator.duration_ns());
        }
        callers.push(timed.len());
        timed.push((operator, operator.duration_ns()));
    }
    timed
}

/// The self times by operator name, the longest first.
pub fn self_times(operators: &[Operator]) -> Vec<(String, SelfTime)> {
    let mut by_name: BTreeMap<&str, SelfTime> = BTreeMap::new();
    for (operator, self_ns) in with_self_ns(operators) {
        let time = by_name.entry(&operator.name).or_default();
        time.count += 1;
        time.self_ns += self_ns;
        time.flops += operator.flops;
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

//! Where compute time goes: operators by the time they spend themselves, not in those they call.

use std::collections::BTreeMap;

use crate::Operator;

/// Operators of one name, together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SelfTime {
    /// How often it ran.
    pub count: u64,
    /// Nanoseconds in it and in no operator it called.
    pub self_ns: u64,
    /// Its floating-point operations.
    pub flops: u64,
}

/// Every operator with the nanoseconds in it and in no operator it called.
pub(crate) fn with_self_ns(operators: &[Operator]) -> Vec<(&Operator, u64)> {
    let mut ordered: Vec<&Operator> = operators.iter().collect();
    // Callers before what they call: they start earlier, or at once and end later.
    ordered.sort_by_key(|o| (o.thread, o.started_ns, u64::MAX - o.ended_ns));
    let mut timed: Vec<(&Operator, u64)> = Vec::with_capacity(ordered.len());
    let mut callers: Vec<usize> = Vec::new();
    for operator in ordered {
        while callers.last().is_some_and(|&place| {
            let caller = timed[place].0;
            caller.thread != operator.thread || caller.ended_ns <= operator.started_ns
        }) {
            callers.pop();
        }
        if let Some(&place) = callers.last() {
            let left = &mut timed[place].1;
            *left = left.saturating_sub(operator.duration_ns());
        }
        callers.push(timed.len());
        timed.push((operator, operator.duration_ns()));
    }
    timed
}

/// Self times by operator name, the longest first.
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
    fn what_is_called_is_not_the_callers_time() {
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

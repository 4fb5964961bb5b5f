//! Stragglers: ranks for which the others wait in every step, although nothing hangs.

use crate::{RankStatus, Stage};

/// A straggler's busy fraction exceeds the median by this factor and by this difference.
const MIN_FACTOR: f64 = 1.25;
const MIN_DIFFERENCE: f64 = 0.15;

/// A rank for which the others wait in every step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Straggler {
    /// The rank.
    pub rank: usize,
    /// The fraction of its step time in which it does not wait for other ranks.
    pub busy_fraction: f64,
    /// The same fraction of the median rank.
    pub median_busy_fraction: f64,
}

/// The stragglers among these ranks, the slowest first.
pub fn stragglers(ranks: &[RankStatus]) -> Vec<Straggler> {
    let stepping = ranks
        .iter()
        .filter(|status| matches!(status.heartbeat.stage, Stage::Stepping | Stage::Observed))
        .filter_map(|status| Some((status.heartbeat.rank, status.heartbeat.busy_fraction?)));
    let mut fractions: Vec<(usize, f64)> = stepping.collect();
    fractions.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    // The lower median: of two ranks it is the faster one.
    let Some(&(_, median)) = fractions.get(fractions.len() / 2) else {
        return Vec::new();
    };
    let is_slow = |busy: f64| busy >= median * MIN_FACTOR && busy >= median + MIN_DIFFERENCE;
    fractions
        .into_iter()
        .filter(|(_, busy)| is_slow(*busy))
        .map(|(rank, busy_fraction)| Straggler {
            rank,
            busy_fraction,
            median_busy_fraction: median,
        })
        .collect()
}

impl std::fmt::Display for Straggler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let percent = |fraction: f64| (100.0 * fraction).round();
        write!(
            f,
            "rank {} is a straggler: it is busy for {} % of a step, the median rank for {} % (the rest is waiting)",
            self.rank,
            percent(self.busy_fraction),
            percent(self.median_busy_fraction)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Heartbeat;

    fn ranks(fractions: &[f64]) -> Vec<RankStatus> {
        let heartbeat = |(rank, fraction): (usize, &f64)| Heartbeat {
            rank,
            stage: Stage::Stepping,
            busy_fraction: Some(*fraction),
            ..Heartbeat::default()
        };
        let heartbeats = fractions.iter().enumerate().map(heartbeat);
        heartbeats
            .map(|heartbeat| RankStatus {
                heartbeat,
                ..RankStatus::default()
            })
            .collect()
    }

    #[test]
    fn a_straggler_is_reported_with_its_busy_fraction() {
        let found = stragglers(&ranks(&[0.55, 0.5, 0.97, 0.52]));
        let messages: Vec<String> = found.iter().map(Straggler::to_string).collect();
        assert_eq!(
            messages,
            [
                "rank 2 is a straggler: it is busy for 97 % of a step, the median rank for 52 % (the rest is waiting)"
            ]
        );
        assert_eq!(stragglers(&ranks(&[0.9, 0.4])).len(), 1);
    }

    #[test]
    fn small_differences_are_not_reported() {
        assert_eq!(stragglers(&ranks(&[0.9, 0.8, 0.85])), []);
        assert_eq!(stragglers(&ranks(&[0.9])), []);
        assert_eq!(stragglers(&ranks(&[])), []);
    }
}

//! Which rank keeps the others waiting, though nothing hangs.

use trainyard_trace::{Sighting, Stage};

/// A rank is slow that works so much more of a step than the rank in the middle, in times and in parts of 1.
const TIMES: f64 = 1.25;
const PARTS: f64 = 0.15;

/// A rank for which the others wait in every step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slow {
    /// Which rank.
    pub rank: usize,
    /// The part of a step in which it works.
    pub works: f64,
    /// The same of the rank in the middle, which waits for the rest.
    pub others: f64,
}

/// The slow ones among these ranks, the slowest first.
pub fn slow(seen: &[Sighting]) -> Vec<Slow> {
    let stepping = seen
        .iter()
        .filter(|one| one.pulse.stage == Stage::Stepping)
        .filter_map(|one| Some((one.pulse.rank, one.pulse.work_share?)));
    let mut shares: Vec<(usize, f64)> = stepping.collect();
    shares.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    // Of an even number the lower of the two: of two ranks, the other one.
    let Some(&(_, others)) = shares.get(shares.len() / 2) else {
        return Vec::new();
    };
    let is_slow = |works: f64| works >= others * TIMES && works >= others + PARTS;
    shares
        .into_iter()
        .filter(|(_, works)| is_slow(*works))
        .map(|(rank, works)| Slow {
            rank,
            works,
            others,
        })
        .collect()
}

impl std::fmt::Display for Slow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let percent = |share: f64| (100.0 * share).round();
        write!(
            f,
            "rank {} is slow: it works {} % of a step, the others {} % and then wait",
            self.rank,
            percent(self.works),
            percent(self.others)
        )
    }
}

#[cfg(test)]
mod tests {
    use trainyard_trace::Pulse;

    use super::*;

    fn seen(shares: &[f64]) -> Vec<Sighting> {
        let pulse = |(rank, share): (usize, &f64)| Pulse {
            rank,
            stage: Stage::Stepping,
            work_share: Some(*share),
            ..Pulse::default()
        };
        let pulses = shares.iter().enumerate().map(pulse);
        pulses
            .map(|pulse| Sighting {
                pulse,
                ..Sighting::default()
            })
            .collect()
    }

    #[test]
    fn a_slow_rank_is_named_with_its_share() {
        let found = slow(&seen(&[0.55, 0.5, 0.97, 0.52]));
        let words: Vec<String> = found.iter().map(Slow::to_string).collect();
        assert_eq!(
            words,
            ["rank 2 is slow: it works 97 % of a step, the others 52 % and then wait"]
        );
        assert_eq!(slow(&seen(&[0.9, 0.4])).len(), 1);
    }

    #[test]
    fn ranks_that_differ_a_little_are_not() {
        assert_eq!(slow(&seen(&[0.9, 0.8, 0.85])), []);
        assert_eq!(slow(&seen(&[0.9])), []);
        assert_eq!(slow(&seen(&[])), []);
    }
}

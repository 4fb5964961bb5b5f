//! Several sources as one stream, each with its share.
//!
//! The stream goes by rounds of equal length. In every round a source comes as often as its weight says,
//! spread evenly; which of its samples come follows from how often it came before. So any place of the
//! stream is found without going through what lies before it, and shares are right in every round.

use std::sync::Arc;

use crate::order::mix;
use crate::{DataError, Order, Sample, Source};

/// Positions of a round.
const ROUND: u64 = 1024;

/// Sources with shares of one endless stream.
pub struct Mixture {
    sources: Vec<Part>,
    /// Which source is at each place of a round, and how often it came before in the round.
    places: Vec<(usize, u64)>,
}

struct Part {
    source: Arc<dyn Source>,
    order: Order,
    /// How often it comes in a round.
    per_round: u64,
}

impl Mixture {
    /// Sources with their weights, which need not add up to one. Each is shuffled by itself, epoch by
    /// epoch.
    pub fn new(sources: Vec<(Arc<dyn Source>, f64)>, seed: u64) -> Result<Mixture, DataError> {
        let weights: Vec<f64> = sources.iter().map(|(_, weight)| *weight).collect();
        let counts = counts(&weights).map_err(DataError::Setting)?;
        let parts = sources.into_iter().zip(&counts).enumerate();
        let parts = parts.map(|(number, ((source, _), &per_round))| Part {
            source,
            order: Order::Shuffled {
                seed: mix(seed ^ mix(number as u64 + 1)),
            },
            per_round,
        });
        Ok(Mixture {
            sources: parts.collect(),
            places: places(&counts),
        })
    }

    /// Which source is at a position, and which of its samples.
    fn locate(&self, position: u64) -> Option<(usize, u64)> {
        let (number, before) = self.places[(position % ROUND) as usize];
        let part = &self.sources[number];
        let own = (position / ROUND) * part.per_round + before;
        let index = part.order.locate(own, part.source.len())?;
        Some((number, index))
    }
}

impl Source for Mixture {
    fn len(&self) -> Option<u64> {
        None
    }

    fn sample(&self, position: u64) -> Result<Sample, DataError> {
        let empty = DataError::OutOfRange {
            index: position,
            len: 0,
        };
        let (number, index) = self.locate(position).ok_or(empty)?;
        self.sources[number].source.sample(index)
    }
}

/// How often each source comes in a round: its share, rounded so that all places are taken.
fn counts(weights: &[f64]) -> Result<Vec<u64>, String> {
    let total: f64 = weights.iter().sum();
    let is_good = |weight: &f64| weight.is_finite() && *weight > 0.0;
    if weights.is_empty() || weights.len() as u64 > ROUND || !weights.iter().all(is_good) {
        return Err("a mixture has sources, each with a weight above zero".to_owned());
    }
    let shares: Vec<f64> = weights.iter().map(|w| w / total * ROUND as f64).collect();
    // Everybody comes at least once; then whoever is furthest below their share.
    let mut counts: Vec<u64> = shares.iter().map(|share| (*share as u64).max(1)).collect();
    while counts.iter().sum::<u64>() != ROUND {
        let is_short = counts.iter().sum::<u64>() < ROUND;
        let gap = |&i: &usize| shares[i] - counts[i] as f64;
        let by_gap = |a: &usize, b: &usize| gap(a).total_cmp(&gap(b));
        let all = 0..counts.len();
        match is_short {
            true => all.max_by(by_gap).map(|i| counts[i] += 1),
            false => all
                .filter(|&i| counts[i] > 1)
                .min_by(by_gap)
                .map(|i| counts[i] -= 1),
        };
    }
    Ok(counts)
}

/// A round: at every place the source that is furthest behind its share.
fn places(counts: &[u64]) -> Vec<(usize, u64)> {
    let mut came = vec![0u64; counts.len()];
    let mut places = Vec::with_capacity(ROUND as usize);
    for place in 1..=ROUND {
        let behind = |&i: &usize| (place * counts[i]) as i64 - (came[i] * ROUND) as i64;
        let left = (0..counts.len()).filter(|&i| came[i] < counts[i]);
        if let Some(next) = left.max_by_key(behind) {
            places.push((next, came[next]));
            came[next] += 1;
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    struct Numbered(u64);

    impl Source for Numbered {
        fn len(&self) -> Option<u64> {
            Some(self.0)
        }

        fn sample(&self, index: u64) -> Result<Sample, DataError> {
            Ok(Sample::from_sequence(&[index as i64, 0]))
        }
    }

    proptest! {
        #[test]
        fn shares_are_right_and_every_sample_comes_once_an_epoch(
            weights in prop::collection::vec(0.01f64..10.0, 1..6),
            len in 1u64..300,
            seed: u64,
        ) {
            let sources = weights.iter().map(|&w| (Arc::new(Numbered(len)) as Arc<dyn Source>, w));
            let mixture = Mixture::new(sources.collect(), seed).unwrap();
            let total: f64 = weights.iter().sum();
            let mut seen = vec![Vec::new(); weights.len()];
            for position in 0..4 * ROUND {
                let (number, index) = mixture.locate(position).unwrap();
                seen[number].push(index);
            }
            for (number, weight) in weights.iter().enumerate() {
                let share = seen[number].len() as f64 / (4 * ROUND) as f64;
                let slack = weights.len() as f64 / ROUND as f64;
                prop_assert!((share - weight / total).abs() <= slack, "{share} of {weights:?}");
                for epoch in seen[number].chunks_exact(len as usize) {
                    let mut epoch = epoch.to_vec();
                    epoch.sort_unstable();
                    prop_assert!(epoch.iter().copied().eq(0..len));
                }
            }
        }
    }

    #[test]
    fn weights_that_mean_nothing_are_refused() {
        for weights in [vec![], vec![0.0], vec![1.0, f64::NAN], vec![-1.0]] {
            assert!(counts(&weights).is_err(), "{weights:?}");
        }
    }
}

//! A weighted mixture of several sources.
//!
//! The stream consists of rounds of equal length. In every round a source is used in proportion to its
//! weight, spread evenly; the index of its sample follows from how often the source was used before. So any
//! position can be computed without iterating over the ones before it, and every round has the right
//! proportions.

use std::sync::Arc;

use crate::order::mix;
use crate::{DataError, Order, Sample, Source};

/// Number of samples per round.
const ROUND_LEN: u64 = 1024;

/// An endless source that mixes several sources by weight.
pub struct Mixture {
    sources: Vec<WeightedSource>,
    /// For each slot of a round, the source and how often it was used before in the round.
    slots: Vec<(usize, u64)>,
}

struct WeightedSource {
    source: Arc<dyn Source>,
    order: Order,
    /// Number of slots per round.
    per_round: u64,
}

impl Mixture {
    /// Mixes sources with the given weights, which need not sum up to one. Each source is shuffled
    /// independently, epoch by epoch.
    pub fn new(sources: Vec<(Arc<dyn Source>, f64)>, seed: u64) -> Result<Mixture, DataError> {
        let weights: Vec<f64> = sources.iter().map(|(_, weight)| *weight).collect();
        let counts = counts(&weights).map_err(DataError::Setting)?;
        let weighted = sources.into_iter().zip(&counts).enumerate();
        let weighted = weighted.map(|(number, ((source, _), &per_round))| WeightedSource {
            source,
            order: Order::Shuffled {
                seed: mix(seed ^ mix(number as u64 + 1)),
            },
            per_round,
        });
        Ok(Mixture {
            sources: weighted.collect(),
            slots: slots(&counts),
        })
    }

    /// The source at a position, and the index of its sample.
    fn locate(&self, position: u64) -> Option<(usize, u64)> {
        let (number, before) = self.slots[(position % ROUND_LEN) as usize];
        let source = &self.sources[number];
        let own = (position / ROUND_LEN) * source.per_round + before;
        let index = source.order.locate(own, source.source.len())?;
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

/// The number of slots of each source per round, rounded so that the sum is the length of a round.
fn counts(weights: &[f64]) -> Result<Vec<u64>, String> {
    let total: f64 = weights.iter().sum();
    let is_valid = |weight: &f64| weight.is_finite() && *weight > 0.0;
    if weights.is_empty() || weights.len() as u64 > ROUND_LEN || !weights.iter().all(is_valid) {
        return Err(format!(
            "a mixture needs 1 to {ROUND_LEN} sources, each with a finite weight above zero"
        ));
    }
    let shares: Vec<f64> = weights
        .iter()
        .map(|w| w / total * ROUND_LEN as f64)
        .collect();
    // Every source has at least one slot; the rest is assigned by the largest rounding error.
    let mut counts: Vec<u64> = shares.iter().map(|share| (*share as u64).max(1)).collect();
    while counts.iter().sum::<u64>() != ROUND_LEN {
        let is_short = counts.iter().sum::<u64>() < ROUND_LEN;
        let gap = |&i: &usize| shares[i] - counts[i] as f64;
        let by_gap = |a: &usize, b: &usize| gap(a).total_cmp(&gap(b));
        let all = 0..counts.len();
        if is_short {
            all.max_by(by_gap).map(|i| counts[i] += 1)
        } else {
            all.filter(|&i| counts[i] > 1)
                .min_by(by_gap)
                .map(|i| counts[i] -= 1)
        };
    }
    Ok(counts)
}

/// The slots of a round: each has the source that is furthest behind its share.
fn slots(counts: &[u64]) -> Vec<(usize, u64)> {
    let mut used = vec![0u64; counts.len()];
    let mut slots = Vec::with_capacity(ROUND_LEN as usize);
    for slot in 1..=ROUND_LEN {
        let behind = |&i: &usize| (slot * counts[i]) as i64 - (used[i] * ROUND_LEN) as i64;
        let left = (0..counts.len()).filter(|&i| used[i] < counts[i]);
        if let Some(next) = left.max_by_key(behind) {
            slots.push((next, used[next]));
            used[next] += 1;
        }
    }
    slots
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
        fn proportions_match_weights_and_epochs_have_every_sample_once(
            weights in prop::collection::vec(0.01f64..10.0, 1..6),
            len in 1u64..300,
            seed: u64,
        ) {
            let sources = weights.iter().map(|&w| (Arc::new(Numbered(len)) as Arc<dyn Source>, w));
            let mixture = Mixture::new(sources.collect(), seed).unwrap();
            let total: f64 = weights.iter().sum();
            let mut seen = vec![Vec::new(); weights.len()];
            for position in 0..4 * ROUND_LEN {
                let (number, index) = mixture.locate(position).unwrap();
                seen[number].push(index);
            }
            for (number, weight) in weights.iter().enumerate() {
                let share = seen[number].len() as f64 / (4 * ROUND_LEN) as f64;
                let slack = weights.len() as f64 / ROUND_LEN as f64;
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
    fn invalid_weights_are_rejected() {
        for weights in [vec![], vec![0.0], vec![1.0, f64::NAN], vec![-1.0]] {
            assert!(counts(&weights).is_err(), "{weights:?}");
        }
    }
}

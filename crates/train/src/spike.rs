//! Loss spikes: a loss far above those of the steps before, by their median and median absolute deviation, which single
//! outliers do not move.

use std::collections::VecDeque;

/// Scales the median absolute deviation to the standard deviation of a normal distribution.
const TO_STANDARD_DEVIATION: f64 = 1.4826;
/// A loss is judged only if it can be compared with this many others.
const MIN_LOSSES: usize = 10;
/// Losses that are all alike have no deviation; a change below this share of the median is never a spike.
const MIN_DEVIATION: f64 = 1e-3;

/// Recent losses, to compare the next one with.
#[derive(Clone, Debug)]
pub(crate) struct SpikeDetector {
    /// 0 if spikes are not looked for.
    threshold: f64,
    window: usize,
    losses: VecDeque<f64>,
}

impl SpikeDetector {
    pub(crate) fn new(threshold: f64, window: u64) -> SpikeDetector {
        SpikeDetector {
            threshold,
            window: window as usize,
            losses: VecDeque::new(),
        }
    }

    /// Adds a loss. Returns its robust z-score if it is a spike; a spike is not compared with later.
    pub(crate) fn observe(&mut self, loss: f64) -> Option<f64> {
        let score = self.score(loss);
        let spike = score.filter(|score| self.threshold > 0.0 && *score > self.threshold);
        if spike.is_none() && loss.is_finite() {
            self.losses.push_back(loss);
            if self.losses.len() > self.window {
                self.losses.pop_front();
            }
        }
        spike
    }

    fn score(&self, loss: f64) -> Option<f64> {
        if self.losses.len() < MIN_LOSSES.min(self.window) {
            return None;
        }
        let middle = median(self.losses.iter().copied());
        let deviation = median(self.losses.iter().map(|other| (other - middle).abs()));
        let deviation = (TO_STANDARD_DEVIATION * deviation).max(MIN_DEVIATION * middle.abs());
        Some((loss - middle) / deviation)
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() % 2 {
        1 => sorted[half],
        _ => f64::midpoint(sorted[half - 1], sorted[half]),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn after(losses: impl IntoIterator<Item = f64>) -> SpikeDetector {
        let mut detector = SpikeDetector::new(6.0, 50);
        for loss in losses {
            assert_eq!(detector.observe(loss), None);
        }
        detector
    }

    #[test]
    fn a_jump_is_a_spike_and_is_forgotten() {
        let noisy = |i: i32| 3.0 + 0.01 * f64::from(i % 5);
        let mut detector = after((0..40).map(noisy));
        assert!(detector.observe(9.0).is_some());
        assert!(detector.observe(9.0).is_some());
        assert_eq!(detector.observe(3.02), None);
    }

    #[test]
    fn the_first_losses_are_not_judged() {
        after([11.0, 3.0, 100.0]);
    }

    proptest! {
        /// Losses that fall, with noise, never look like a spike.
        #[test]
        fn falling_losses_are_no_spikes(rate in 0.0..0.05f64, noise in prop::collection::vec(-0.02..0.02f64, 200)) {
            after(noise.iter().enumerate().map(|(i, n)| 2.0 + 8.0 * (-rate * i as f64).exp() + n));
        }
    }
}

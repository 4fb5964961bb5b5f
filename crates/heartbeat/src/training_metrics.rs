//! What a rank's training loop measures, for the metrics of its job.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The latest measurements of a rank. Counters begin with the rank's process.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct TrainingMetrics {
    /// Whether the last reported loss was infinite or not a number, which JSON has no number for.
    pub is_loss_invalid: bool,
    /// The last reported norm of the gradients.
    pub grad_norm: Option<f64>,
    /// The learning rate of the last reported step.
    pub learning_rate: Option<f64>,
    /// Model FLOPs utilization, from 0 to 1.
    pub mfu: Option<f64>,
    /// The fraction of recent step time in which the rank waited for data.
    pub data_wait_fraction: Option<f64>,
    /// The durations of all steps.
    pub step_times: StepHistogram,
    /// The bytes that the rank has sent in collectives.
    pub sent_bytes: Vec<SentBytes>,
    /// The last save of a checkpoint.
    pub last_save: Option<Save>,
    /// The memory of the rank at its peak, by what it is for, if it is counted.
    pub peak_memory: Vec<MemoryUse>,
}

/// The memory that is for one thing.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct MemoryUse {
    /// What it is for.
    pub kind: String,
    /// The number of bytes.
    pub bytes: u64,
}

/// The bytes that a rank has sent for one purpose in one group.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SentBytes {
    /// What the bytes were for.
    pub purpose: String,
    /// The name of the group.
    pub group: String,
    /// The number of bytes.
    pub bytes: u64,
}

/// A save of a checkpoint to storage.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Save {
    /// The step that was saved.
    pub step: u64,
    /// How long training paused for it.
    pub pause_seconds: f64,
    /// When it was made, in seconds since 1970.
    pub unix_seconds: f64,
}

/// A histogram of step durations.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct StepHistogram {
    /// The number of steps up to each of the [bounds](Self::BOUNDS) and above the one before, and of longer ones.
    pub counts: [u64; StepHistogram::BOUNDS.len() + 1],
    /// The sum of all durations in seconds.
    pub sum_seconds: f64,
}

impl StepHistogram {
    /// The upper bounds of the buckets in seconds.
    pub const BOUNDS: [f64; 14] = [
        0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    ];

    /// Adds a step.
    pub fn record(&mut self, took: Duration) {
        let seconds = took.as_secs_f64();
        let bucket = StepHistogram::BOUNDS.partition_point(|bound| *bound < seconds);
        self.counts[bucket] += 1;
        self.sum_seconds += seconds;
    }

    /// The number of steps.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Adds all steps of another histogram.
    pub fn add(&mut self, other: &StepHistogram) {
        let pairs = self.counts.iter_mut().zip(other.counts);
        pairs.for_each(|(count, other)| *count += other);
        self.sum_seconds += other.sum_seconds;
    }

    /// The steps since an earlier state of this histogram.
    pub fn since(&self, earlier: &StepHistogram) -> StepHistogram {
        StepHistogram {
            counts: std::array::from_fn(|bucket| {
                self.counts[bucket].saturating_sub(earlier.counts[bucket])
            }),
            sum_seconds: (self.sum_seconds - earlier.sum_seconds).max(0.0),
        }
    }
}

impl Default for StepHistogram {
    fn default() -> StepHistogram {
        StepHistogram {
            counts: [0; StepHistogram::BOUNDS.len() + 1],
            sum_seconds: 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_counted_in_the_first_bucket_that_has_room() {
        let mut histogram = StepHistogram::default();
        for seconds in [0.01, 0.02, 0.3, 1000.0] {
            histogram.record(Duration::from_secs_f64(seconds));
        }
        let filled: Vec<usize> = (0..15)
            .filter(|bucket| histogram.counts[*bucket] > 0)
            .collect();
        assert_eq!(filled, [0, 1, 5, 14]);
        assert_eq!(histogram.count(), 4);
        let earlier = histogram.clone();
        histogram.record(Duration::from_secs(2));
        let latest = histogram.since(&earlier);
        assert_eq!((latest.count(), latest.counts[7]), (1, 1));
        assert!((latest.sum_seconds - 2.0).abs() < 1e-9);
        let mut sum = earlier;
        sum.add(&latest);
        assert_eq!(sum.counts, histogram.counts);
    }
}

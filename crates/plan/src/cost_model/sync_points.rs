//! The cost of synchronization points: communication, and the wait for stragglers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::linear::{LinearCost, Sample};

/// One row of `trainyard bench comm --json`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct CommSample {
    op: String,
    bytes: f64,
    work_us: f64,
    time_us: f64,
    algbw_gbps: f64,
    busbw_gbps: f64,
}

/// The wait at synchronization points for ranks that are slower by chance.
#[derive(Copy, Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct StragglerWait {
    /// Wait at a synchronization point as a fraction of the compute time before it.
    pub share: f64,
    /// The compute time, in seconds, at which the fraction was measured.
    pub interval: f64,
}

impl StragglerWait {
    /// Seconds of waiting at `num_sync_points` points for ranks that compute for `seconds` in total. Random delays
    /// average out over longer intervals (their variances add), so ranks that synchronize less often lose less.
    pub fn at(&self, num_sync_points: u64, seconds: f64) -> f64 {
        let interval = seconds / num_sync_points.max(1) as f64;
        let averaged = (self.interval / interval.max(f64::MIN_POSITIVE))
            .min(1.0)
            .sqrt();
        match num_sync_points {
            0 => 0.0,
            _ => self.share * seconds * averaged,
        }
    }
}

/// Fits the cost of each collective over the bytes that a rank sends, which is the size times bus over algorithm
/// bandwidth. Only calls after the least compute are used, because straggler waits are modeled separately.
pub(super) fn collectives(samples: &[CommSample]) -> BTreeMap<String, LinearCost> {
    let mut by_op: BTreeMap<&str, Vec<Sample>> = BTreeMap::new();
    for (least, _) in by_size(samples) {
        let bus_factor = if least.algbw_gbps == 0.0 {
            0.0
        } else {
            least.busbw_gbps / least.algbw_gbps
        };
        by_op.entry(&least.op).or_default().push(Sample {
            units: least.bytes * bus_factor,
            seconds: (least.time_us / 1e6).max(0.0),
            count: 1.0,
        });
    }
    by_op
        .iter()
        .map(|(op, samples)| ((*op).to_owned(), LinearCost::fit(samples)))
        .collect()
}

/// Fits the straggler wait: how much longer a call takes the more compute precedes it.
pub(super) fn straggler_wait(samples: &[CommSample]) -> StragglerWait {
    let pairs = by_size(samples);
    let sum = |of: fn(&(&CommSample, &CommSample)) -> f64| pairs.iter().map(of).sum::<f64>();
    let longer = sum(|(least, most)| most.time_us - least.time_us);
    let more = sum(|(least, most)| most.work_us - least.work_us);
    if more <= 0.0 {
        return StragglerWait::default();
    }
    StragglerWait {
        share: (longer / more).max(0.0),
        interval: sum(|(_, most)| most.work_us) / 1e6 / pairs.len() as f64,
    }
}

/// For every collective and size, the call after the least and the one after the most compute.
fn by_size(samples: &[CommSample]) -> Vec<(&CommSample, &CommSample)> {
    let mut pairs: Vec<(&CommSample, &CommSample)> = Vec::new();
    for sample in samples {
        let same = |pair: &&mut (&CommSample, &CommSample)| {
            pair.0.op == sample.op && pair.0.bytes == sample.bytes
        };
        match pairs.iter_mut().find(same) {
            Some(pair) if sample.work_us < pair.0.work_us => pair.0 = sample,
            Some(pair) if sample.work_us > pair.1.work_us => pair.1 = sample,
            Some(_) => {}
            None => pairs.push((sample, sample)),
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_a_rank_sends_and_waits_are_separate() {
        let row = |bytes: f64, work_us: f64, time_us: f64| CommSample {
            op: "all_reduce".to_owned(),
            bytes,
            work_us,
            time_us,
            algbw_gbps: 2.0,
            busbw_gbps: 3.0,
        };
        let rows = [
            row(1e6, 10.0, 101.5),
            row(1e6, 110.0, 106.5),
            row(2e6, 10.0, 103.0),
            row(2e6, 110.0, 108.0),
        ];
        let cost = collectives(&rows)["all_reduce"];
        assert!((cost.at(1.5e6) - 101.5e-6).abs() < 1e-9);
        assert!((cost.at(0.0) - 100e-6).abs() < 1e-8);
        let waits = straggler_wait(&rows);
        assert!((waits.share - 0.05).abs() < 1e-12);
        // At the measured interval ranks lose that fraction; with a quarter of the synchronization points, half of
        // it.
        assert!((waits.at(100, 110e-4) - 0.05 * 110e-4).abs() < 1e-12);
        assert!((waits.at(25, 110e-4) - 0.025 * 110e-4).abs() < 1e-12);
        assert_eq!(waits.at(0, 1.0), 0.0);
    }
}

//! What it costs ranks to meet: the message, and the wait for the slower one.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::line::{Line, Sample};

/// One row of `trainyard bench comm --json`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Message {
    op: String,
    bytes: f64,
    work_us: f64,
    time_us: f64,
    algbw_gbps: f64,
    busbw_gbps: f64,
}

/// Waiting for the rank that is slower by chance.
#[derive(Copy, Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Waits {
    /// Seconds at a meeting, over those that ranks computed before it.
    pub share: f64,
    /// How long they had computed when that was measured.
    pub after: f64,
}

impl Waits {
    /// Seconds at that many meetings of ranks that compute for `seconds` in all. Delays come and go: those
    /// of a longer time add up as squares, so that ranks that meet seldom lose less.
    pub fn at(&self, num_meetings: u64, seconds: f64) -> f64 {
        let between = seconds / num_meetings.max(1) as f64;
        let averaged = (self.after / between.max(f64::MIN_POSITIVE))
            .min(1.0)
            .sqrt();
        match num_meetings {
            0 => 0.0,
            _ => self.share * seconds * averaged,
        }
    }
}

/// A rank sends as much as the bus carries: bandwidths' ratio says how much that is of the size. Waiting for the
/// slower rank is counted apart, so calls after the least work tell what the message takes.
pub(super) fn collectives(messages: &[Message]) -> BTreeMap<String, Line> {
    let mut alike: BTreeMap<&str, Vec<Sample>> = BTreeMap::new();
    for (least, _) in by_size(messages) {
        let carried = match least.algbw_gbps == 0.0 {
            true => 0.0,
            false => least.busbw_gbps / least.algbw_gbps,
        };
        alike.entry(&least.op).or_default().push(Sample {
            units: least.bytes * carried,
            seconds: (least.time_us / 1e6).max(0.0),
            count: 1.0,
        });
    }
    alike
        .iter()
        .map(|(op, samples)| ((*op).to_owned(), Line::through(samples)))
        .collect()
}

/// How much longer a call takes the more was computed before it, over all calls.
pub(super) fn waits(messages: &[Message]) -> Waits {
    let pairs = by_size(messages);
    let sum = |of: fn(&(&Message, &Message)) -> f64| pairs.iter().map(of).sum::<f64>();
    let longer = sum(|(least, most)| most.time_us - least.time_us);
    let more = sum(|(least, most)| most.work_us - least.work_us);
    if more <= 0.0 {
        return Waits::default();
    }
    Waits {
        share: (longer / more).max(0.0),
        after: sum(|(_, most)| most.work_us) / 1e6 / pairs.len() as f64,
    }
}

/// Of every collective and size the call after the least work, and the one after most.
fn by_size(messages: &[Message]) -> Vec<(&Message, &Message)> {
    let mut pairs: Vec<(&Message, &Message)> = Vec::new();
    for message in messages {
        let same = |pair: &&mut (&Message, &Message)| {
            pair.0.op == message.op && pair.0.bytes == message.bytes
        };
        match pairs.iter_mut().find(same) {
            Some(pair) if message.work_us < pair.0.work_us => pair.0 = message,
            Some(pair) if message.work_us > pair.1.work_us => pair.1 = message,
            Some(_) => {}
            None => pairs.push((message, message)),
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_a_rank_sends_and_waits_are_counted_apart() {
        let row = |bytes: f64, work_us: f64, time_us: f64| Message {
            op: "all_reduce".to_owned(),
            bytes,
            work_us,
            time_us,
            algbw_gbps: 2.0,
            busbw_gbps: 3.0,
        };
        let seen = [
            row(1e6, 10.0, 101.5),
            row(1e6, 110.0, 106.5),
            row(2e6, 10.0, 103.0),
            row(2e6, 110.0, 108.0),
        ];
        let line = collectives(&seen)["all_reduce"];
        assert!((line.at(1.5e6) - 101.5e-6).abs() < 1e-9);
        assert!((line.at(0.0) - 100e-6).abs() < 1e-8);
        let waits = waits(&seen);
        assert!((waits.share - 0.05).abs() < 1e-12);
        // As often as it was measured, ranks lose that share; with a quarter of the meetings half of it.
        assert!((waits.at(100, 110e-4) - 0.05 * 110e-4).abs() < 1e-12);
        assert!((waits.at(25, 110e-4) - 0.025 * 110e-4).abs() < 1e-12);
        assert_eq!(waits.at(0, 1.0), 0.0);
    }
}

//! What the page draws over time: samples of the job, and what happened to it.

use serde::Serialize;

/// When there are this many samples, every other one is dropped.
const MAX_SAMPLES: usize = 1200;
/// The newest events are kept.
const MAX_EVENTS: usize = 200;

/// The past of a job. Its size is bounded: the longer the job, the more time lies between two samples.
#[derive(Clone, Debug)]
pub(crate) struct History {
    /// The seconds between two samples.
    interval: f64,
    samples: Vec<JobSample>,
    events: Vec<JobEvent>,
    /// The number of events so far, with those that were dropped.
    num_events: usize,
}

/// What a page has already received.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Received {
    interval: f64,
    time: f64,
    num_events: usize,
}

/// What a page has not received yet.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct News<'a> {
    /// Whether the samples replace all earlier ones, because some of those were dropped.
    replaces: bool,
    samples: &'a [JobSample],
    events: &'a [JobEvent],
}

/// The state of a job at one time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct JobSample {
    /// Seconds since the start of the launcher.
    pub(crate) time: f64,
    pub(crate) step: Option<u64>,
    pub(crate) loss: Option<f64>,
    pub(crate) tokens_per_second: Option<f64>,
    /// The percentage of step time that ranks wait for others, by row of the heat map.
    pub(crate) waits: Vec<Option<u8>>,
}

/// Something that happened to a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct JobEvent {
    /// Seconds since the start of the launcher.
    pub(crate) time: f64,
    pub(crate) kind: EventKind,
    /// A sentence about it.
    pub(crate) text: String,
}

/// The kinds of events.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EventKind {
    Start,
    Failure,
    Straggler,
    Checkpoint,
    End,
}

impl Default for History {
    fn default() -> History {
        History {
            interval: 1.0,
            samples: Vec::new(),
            events: Vec::new(),
            num_events: 0,
        }
    }
}

impl History {
    /// Whether a sample is due at this time.
    pub(crate) fn is_due(&self, time: f64) -> bool {
        let last = self.samples.last();
        last.is_none_or(|last| time >= last.time + self.interval)
    }

    /// Adds a sample.
    pub(crate) fn add(&mut self, sample: JobSample) {
        if self.samples.len() >= MAX_SAMPLES {
            let mut index = 0;
            self.samples.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.interval *= 2.0;
        }
        self.samples.push(sample);
    }

    /// Adds an event.
    pub(crate) fn happened(&mut self, event: JobEvent) {
        if self.events.len() >= MAX_EVENTS {
            self.events.remove(0);
        }
        self.events.push(event);
        self.num_events += 1;
    }

    /// What is new since `received`, and what has been received then.
    pub(crate) fn since(&self, received: Received) -> (News<'_>, Received) {
        let replaces = received.interval != self.interval;
        let is_old = |sample: &JobSample| !replaces && sample.time <= received.time;
        let first = self.samples.partition_point(is_old);
        let num_new = self.num_events - received.num_events;
        let news = News {
            replaces,
            samples: &self.samples[first..],
            events: &self.events[self.events.len().saturating_sub(num_new)..],
        };
        let received = Received {
            interval: self.interval,
            time: self.samples.last().map_or(received.time, |last| last.time),
            num_events: self.num_events,
        };
        (news, received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(time: f64) -> JobSample {
        JobSample {
            time,
            step: None,
            loss: None,
            tokens_per_second: None,
            waits: Vec::new(),
        }
    }

    #[test]
    fn a_long_history_keeps_its_span_in_bounded_memory() {
        let mut history = History::default();
        let times = (0..40_000).map(|half| f64::from(half) / 2.0);
        for time in times {
            if history.is_due(time) {
                history.add(sample(time));
            }
        }
        assert!(history.samples.len() <= MAX_SAMPLES);
        assert_eq!(history.samples[0].time, 0.0);
        let last = history.samples.last().map(|last| last.time);
        assert!(last.is_some_and(|last| last >= 20_000.0 - 2.0 * history.interval));
        let gaps = history.samples.windows(2);
        let longest = gaps
            .map(|pair| pair[1].time - pair[0].time)
            .fold(0.0, f64::max);
        assert!(longest <= 2.0 * history.interval);
    }

    #[test]
    fn a_page_that_follows_has_what_a_page_has_that_comes_later() {
        let (mut history, mut received) = (History::default(), Received::default());
        let (mut samples, mut events) = (Vec::new(), Vec::new());
        for second in 0..3 * MAX_SAMPLES as u32 {
            let time = f64::from(second);
            if history.is_due(time) {
                history.add(sample(time));
            }
            if second % 100 == 0 {
                history.happened(JobEvent {
                    time,
                    kind: EventKind::Checkpoint,
                    text: String::new(),
                });
            }
            if second % 7 == 0 {
                let (news, now) = history.since(received);
                if news.replaces {
                    samples.clear();
                }
                samples.extend_from_slice(news.samples);
                events.extend_from_slice(news.events);
                received = now;
            }
        }
        let (rest, _) = history.since(received);
        assert!(!rest.replaces);
        samples.extend_from_slice(rest.samples);
        events.extend_from_slice(rest.events);
        let (all, _) = history.since(Received::default());
        assert!(all.replaces);
        assert_eq!((&samples[..], &events[..]), (all.samples, all.events));
    }
}

//! What a page shows of a job: its past, and how it is now.

use std::time::{Instant, SystemTime};

use serde::Serialize;
use trainyard_launcher::Outcome;
use trainyard_trace::counted;

use super::history::{EventKind, History, JobEvent, JobSample, News, Received};
use super::prediction::Prediction;
use super::state::{JobState, is_stuck};
use crate::job_metrics::JobMetrics;

/// The heat map has at most this many rows; in larger jobs a row is several ranks.
const MAX_ROWS: usize = 256;

/// The past of a job, and what else does not change with its ranks.
#[derive(Debug)]
pub(crate) struct Record {
    run_id: String,
    prediction: Option<Prediction>,
    history: History,
    slow: Vec<usize>,
    saved_step: Option<u64>,
    /// Reports of failures that are in the history.
    failures: Vec<String>,
}

/// A message to a page.
#[derive(Debug, Serialize)]
struct Message<'a> {
    run_id: &'a str,
    /// Seconds since the start of the launcher.
    time: f64,
    ranks_per_row: usize,
    prediction: Option<&'a Prediction>,
    state: JobState,
    news: News<'a>,
}

impl Record {
    /// The record of a job that begins now.
    pub(crate) fn new(run_id: String, prediction: Option<Prediction>) -> Record {
        Record {
            run_id,
            prediction,
            history: History::default(),
            slow: Vec::new(),
            saved_step: None,
            failures: Vec::new(),
        }
    }

    /// The ranks have been started, perhaps after failures.
    pub(crate) fn start(&mut self, metrics: &JobMetrics, failures: &[String]) {
        for report in failures {
            self.failed(metrics, report);
        }
        let Some(world) = metrics.world else { return };
        let ranks = counted(world.size as u64, "rank");
        let restarts: u64 = metrics.restarts.values().sum();
        let what = match restarts {
            0 => format!("{ranks} started"),
            _ => format!("restart {restarts}: {ranks} started"),
        };
        self.slow.clear();
        self.happened(metrics, EventKind::Start, what);
    }

    /// The metrics of the ranks have changed.
    pub(crate) fn observe(&mut self, metrics: &JobMetrics) {
        let new = metrics.slow.iter().filter(|rank| !self.slow.contains(rank));
        for rank in new.copied().collect::<Vec<usize>>() {
            let text = format!("rank {rank} is a straggler: the others wait for it");
            self.happened(metrics, EventKind::Straggler, text);
        }
        self.slow.clone_from(&metrics.slow);
        let step = metrics.last_save.map(|save| save.step);
        if let Some(step) = step.filter(|step| self.saved_step != Some(*step)) {
            self.saved_step = Some(step);
            let text = format!("step {step} was saved");
            self.happened(metrics, EventKind::Checkpoint, text);
        }
        let time = seconds(metrics);
        if self.history.is_due(time) {
            self.history.add(sample(metrics, time));
        }
    }

    /// The ranks have exited.
    pub(crate) fn end(&mut self, metrics: &JobMetrics, outcome: &Outcome) {
        match outcome.report() {
            Some(report) => self.failed(metrics, &report),
            None => {
                let text = "all ranks have exited".to_owned();
                self.happened(metrics, EventKind::End, text);
            }
        }
    }

    fn failed(&mut self, metrics: &JobMetrics, report: &str) {
        if !self.failures.iter().any(|known| known == report) {
            self.failures.push(report.to_owned());
            self.happened(metrics, EventKind::Failure, report.to_owned());
        }
    }

    /// The message with what a page has not received yet.
    pub(crate) fn message(
        &self,
        metrics: &JobMetrics,
        received: Received,
    ) -> serde_json::Result<(String, Received)> {
        let (news, received) = self.history.since(received);
        let message = Message {
            run_id: &self.run_id,
            time: seconds(metrics),
            ranks_per_row: ranks_per_row(metrics),
            prediction: self.prediction.as_ref(),
            state: JobState::new(metrics, SystemTime::now()),
            news,
        };
        Ok((serde_json::to_string(&message)?, received))
    }

    fn happened(&mut self, metrics: &JobMetrics, kind: EventKind, text: String) {
        let time = seconds(metrics);
        self.history.happened(JobEvent { time, kind, text });
    }
}

fn seconds(metrics: &JobMetrics) -> f64 {
    metrics.elapsed(Instant::now()).as_secs_f64()
}

fn ranks_per_row(metrics: &JobMetrics) -> usize {
    let size = metrics.world.map_or(1, |world| world.size);
    size.div_ceil(MAX_ROWS).max(1)
}

fn sample(metrics: &JobMetrics, time: f64) -> JobSample {
    let step = metrics.step();
    if is_stuck(metrics) {
        return JobSample {
            time,
            step,
            loss: None,
            tokens_per_second: None,
            waits: Vec::new(),
        };
    }
    let lead = metrics.lead();
    let loss = lead.filter(|lead| !lead.metrics.is_loss_invalid);
    JobSample {
        time,
        step,
        loss: loss.and_then(|lead| lead.loss),
        tokens_per_second: metrics.tokens_per_second(),
        waits: waits(metrics),
    }
}

/// The percentage of step time that ranks wait for others; of several ranks in a row, that of the one that waits least,
/// because the others wait for it.
fn waits(metrics: &JobMetrics) -> Vec<Option<u8>> {
    let size = metrics.world.map_or(0, |world| world.size);
    let per_row = ranks_per_row(metrics);
    let mut rows = vec![None; size.div_ceil(per_row)];
    for (rank, status) in &metrics.ranks {
        let wait = status.heartbeat.busy_fraction.map(|busy| {
            // From 0 to 100 for every busy fraction that a rank may report.
            (100.0 * (1.0 - busy)).clamp(0.0, 100.0).round() as u8
        });
        if let Some(row) = rows.get_mut(rank / per_row) {
            *row = match (*row, wait) {
                (Some(least), Some(wait)) => Some(wait.min(least)),
                (least, wait) => least.or(wait),
            };
        }
    }
    rows
}

//! The metrics of a job: what its ranks report, summed over restarts.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use trainyard_heartbeat::{Heartbeat, RankStatus, Save, StepHistogram};
use trainyard_launcher::{Job, Observation, Outcome};

use crate::goodput::{Goodput, Position};
use crate::restart_cause::RestartCause;

/// The state of a job as far as this node knows it, and its counters since this program began.
#[derive(Clone, Debug)]
pub struct JobMetrics {
    began: Instant,
    pub(crate) world: Option<World>,
    pub(crate) is_running: bool,
    /// The last status of every rank since the last start. Ranks that have exited stay.
    pub(crate) ranks: BTreeMap<usize, RankStatus>,
    /// The ranks that are slow without hanging.
    pub(crate) slow: Vec<usize>,
    pub(crate) num_hung: usize,
    pub(crate) restarts: BTreeMap<RestartCause, u64>,
    /// How the ranks have ended, until they start again.
    outcome: Option<Outcome>,
    goodput: Goodput,
    last_step: Option<(u64, SystemTime)>,
    /// The newest checkpoint.
    pub(crate) last_save: Option<Save>,
    /// Steps and bytes of processes that have ended.
    earlier_steps: StepHistogram,
    earlier_bytes: SentBytes,
}

/// Bytes by purpose and group.
pub(crate) type SentBytes = BTreeMap<(String, String), u64>;

/// The ranks that were started last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct World {
    pub(crate) size: usize,
    /// Only in elastic runs.
    pub(crate) epoch: Option<u64>,
    /// The restarts after failures before.
    restart_count: usize,
}

impl JobMetrics {
    /// The metrics of a job that begins now.
    pub fn new(now: Instant) -> JobMetrics {
        JobMetrics {
            began: now,
            world: None,
            is_running: false,
            ranks: BTreeMap::new(),
            slow: Vec::new(),
            num_hung: 0,
            restarts: BTreeMap::new(),
            outcome: None,
            goodput: Goodput::default(),
            last_step: None,
            last_save: None,
            earlier_steps: StepHistogram::default(),
            earlier_bytes: SentBytes::new(),
        }
    }

    /// The metrics, from now on, of a job that runs already.
    pub fn attached(now: Instant) -> JobMetrics {
        JobMetrics {
            goodput: Goodput::attached(),
            ..JobMetrics::new(now)
        }
    }

    /// Ranks have been started.
    pub fn start(&mut self, job: &Job) {
        if let Some((outcome, world)) = self.outcome.take().zip(self.world) {
            let is_failure = job.restart_count > world.restart_count;
            let cause = RestartCause::of(&outcome, is_failure);
            *self.restarts.entry(cause).or_default() += 1;
        }
        self.earlier_steps = self.step_times();
        self.earlier_bytes = self.sent_bytes();
        self.ranks.clear();
        self.slow.clear();
        self.num_hung = 0;
        self.goodput.restart();
        self.world = Some(World {
            size: job.world_size(),
            epoch: job.epoch,
            restart_count: job.restart_count,
        });
        self.is_running = true;
    }

    /// Heartbeats have been read.
    pub fn observe(&mut self, observation: &Observation<'_>, time: SystemTime) {
        let ranks = observation.ranks.iter();
        let ranks = ranks.map(|status| (status.heartbeat.rank, status.clone()));
        self.ranks.extend(ranks);
        self.slow = observation.slow_ranks.to_vec();
        self.num_hung = observation.num_hung;
        self.observe_progress(time);
    }

    fn observe_progress(&mut self, time: SystemTime) {
        let Some(lead) = self.lead() else { return };
        let save = lead.metrics.last_save.or(self.last_save);
        let position = lead.steps_taken().map(|steps| Position {
            steps,
            steps_of_process: lead.metrics.step_times.count(),
            seconds_of_process: lead.metrics.step_times.sum_seconds,
        });
        self.last_save = save;
        if let Some(position) = position {
            self.goodput.observe(position);
        }
        let step = self.step();
        if let Some(step) = step.filter(|step| self.last_step.is_none_or(|(last, _)| last != *step))
        {
            self.last_step = Some((step, time));
        }
    }

    /// The ranks have exited.
    pub fn end(&mut self, outcome: &Outcome) {
        self.is_running = false;
        self.outcome = Some(outcome.clone());
    }

    /// The rank whose reports stand for the job, if it is known here: rank 0.
    pub(crate) fn lead(&self) -> Option<&Heartbeat> {
        self.ranks.get(&0).map(|status| &status.heartbeat)
    }

    /// The steps that all ranks have completed.
    pub(crate) fn step(&self) -> Option<u64> {
        let taken = self.ranks.values().map(|each| each.heartbeat.steps_taken());
        taken.min().flatten()
    }

    /// When a step was last completed, in seconds since 1970.
    pub(crate) fn last_step_seconds(&self) -> Option<f64> {
        let (_, time) = self.last_step?;
        let since = time.duration_since(SystemTime::UNIX_EPOCH);
        Some(since.unwrap_or_default().as_secs_f64())
    }

    /// The tokens per second of all ranks; `None` if none reports them.
    pub(crate) fn tokens_per_second(&self) -> Option<f64> {
        let speeds = self.ranks.values();
        let speeds = speeds.filter_map(|status| status.heartbeat.tokens_per_second);
        speeds.reduce(|sum, each| sum + each)
    }

    /// The most memory that a rank has used.
    pub(crate) fn peak_bytes(&self) -> Option<u64> {
        let peaks = self.ranks.values();
        peaks.filter_map(|status| status.heartbeat.peak_bytes).max()
    }

    /// The durations of the first rank's steps.
    pub(crate) fn step_times(&self) -> StepHistogram {
        let mut all = self.earlier_steps.clone();
        if let Some(lead) = self.lead() {
            all.add(&lead.metrics.step_times);
        }
        all
    }

    /// What the known ranks have sent.
    pub(crate) fn sent_bytes(&self) -> SentBytes {
        let mut all = self.earlier_bytes.clone();
        let ranks = self.ranks.values();
        for sent in ranks.flat_map(|status| &status.heartbeat.metrics.sent_bytes) {
            let key = (sent.purpose.clone(), sent.group.clone());
            *all.entry(key).or_default() += sent.bytes;
        }
        all
    }

    pub(crate) fn goodput(&self) -> &Goodput {
        &self.goodput
    }

    /// How long the job has taken so far.
    pub(crate) fn elapsed(&self, now: Instant) -> Duration {
        now.duration_since(self.began)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use trainyard_heartbeat::Stage;

    use super::*;

    /// The status of a rank whose process has taken `num` steps of a second each, and has completed step `step`.
    pub(crate) fn status(rank: usize, step: u64, num: u64) -> RankStatus {
        let mut heartbeat = Heartbeat {
            rank,
            stage: Stage::Stepping,
            step: step + 1,
            num_steps: 100,
            loss: Some(2.5),
            tokens_per_second: Some(100.0),
            peak_bytes: Some(1 << 30),
            ..Heartbeat::default()
        };
        let metrics = &mut heartbeat.metrics;
        (0..num).for_each(|_| metrics.step_times.record(Duration::from_secs(1)));
        metrics.sent_bytes.push(trainyard_heartbeat::SentBytes {
            purpose: "gradient".to_owned(),
            group: "dp_replicate".to_owned(),
            bytes: 10 * num,
        });
        RankStatus {
            heartbeat,
            ..RankStatus::default()
        }
    }

    pub(crate) fn observe(metrics: &mut JobMetrics, ranks: &[RankStatus], seconds: u64) {
        let observation = Observation {
            ranks,
            slow_ranks: &[],
            num_hung: 0,
            now: Instant::now(),
        };
        metrics.observe(
            &observation,
            SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
        );
    }

    #[test]
    fn counters_go_on_after_a_restart() {
        let job = Job::new("train", 2);
        let mut metrics = JobMetrics::new(Instant::now());
        metrics.start(&job);
        observe(&mut metrics, &[status(0, 10, 10), status(1, 9, 9)], 100);
        assert_eq!(metrics.step(), Some(9), "the slowest rank");
        assert_eq!(metrics.tokens_per_second(), Some(200.0));
        // Of a rank that has exited, the last status counts.
        observe(&mut metrics, &[status(1, 10, 10)], 101);
        assert_eq!(
            (metrics.step(), metrics.last_step_seconds()),
            (Some(10), Some(101.0))
        );
        metrics.end(&Outcome {
            exits: Vec::new(),
            first_failure: None,
            interrupted_by: None,
        });
        assert!(!metrics.is_running);
        metrics.start(&Job {
            restart_count: 1,
            ..job.clone()
        });
        assert_eq!(metrics.restarts[&RestartCause::OtherNode], 1);
        assert_eq!(metrics.step(), None);
        observe(&mut metrics, &[status(0, 8, 2), status(1, 8, 2)], 110);
        assert_eq!(metrics.step_times().count(), 12);
        assert_eq!(metrics.sent_bytes().into_values().sum::<u64>(), 240);
        assert_eq!(
            (
                metrics.goodput().useful_seconds(),
                metrics.goodput().lost_steps()
            ),
            (10.0, 4)
        );
        observe(&mut metrics, &[status(0, 8, 2), status(1, 8, 2)], 111);
        assert_eq!(metrics.last_step_seconds(), Some(110.0));
    }
}

//! The present state of a job as the page shows it.

use std::time::{Duration, SystemTime};

use serde::Serialize;
use trainyard_heartbeat::{
    CollectiveInFlight, Heartbeat, MemoryUse, MeshAxis, RankStatus, Stage, collectives_in_flight,
};

use crate::job_metrics::JobMetrics;

/// In larger jobs only ranks that are not healthy are described in words.
const MAX_DESCRIBED: usize = 128;
/// The memory of this many ranks is shown, of those with the most.
const MAX_MEMORY_ROWS: usize = 16;
/// The oldest collectives are shown.
const MAX_IN_FLIGHT: usize = 16;
/// A rank is stalled if its step takes this many times as long as the longest usual one, and at least this long.
const STALLED_STEPS: u32 = 4;
const MIN_STALL: Duration = Duration::from_secs(5);

/// The state of a job.
#[derive(Debug, Serialize)]
pub(crate) struct JobState {
    status: JobStatus,
    world_size: Option<usize>,
    /// Only in elastic runs.
    epoch: Option<u64>,
    step: Option<u64>,
    num_steps: Option<u64>,
    loss: Option<f64>,
    is_loss_invalid: bool,
    grad_norm: Option<f64>,
    learning_rate: Option<f64>,
    tokens_per_second: Option<f64>,
    mfu: Option<f64>,
    step_seconds: Option<f64>,
    data_wait: Option<f64>,
    peak_bytes: Option<u64>,
    useful_seconds: f64,
    lost_steps: u64,
    restarts: u64,
    checkpoint: Option<Checkpoint>,
    mesh: Vec<MeshAxis>,
    ranks: Vec<RankState>,
    memory: Vec<RankMemory>,
    in_flight: Vec<Transfer>,
}

/// What a job is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum JobStatus {
    /// Its ranks have not reported anything yet.
    Starting,
    Running,
    /// Its ranks have exited; the launcher starts them again or ends.
    Stopped,
}

#[derive(Debug, Serialize)]
struct Checkpoint {
    step: u64,
    age_seconds: f64,
    pause_seconds: f64,
}

#[derive(Debug, Serialize)]
struct RankState {
    rank: usize,
    status: RankHealth,
    /// The share of step time in which it waits for others, from 0 to 1.
    wait: Option<f64>,
    text: Option<String>,
}

/// How a rank is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum RankHealth {
    Starting,
    Healthy,
    /// The others wait for it in every step.
    Straggler,
    /// Its step takes much longer than usual.
    Stalled,
    /// Its process does not run.
    NotRunning,
    Ended,
}

#[derive(Debug, Serialize)]
struct RankMemory {
    rank: usize,
    peak_bytes: u64,
    kinds: Vec<MemoryUse>,
}

#[derive(Debug, Serialize)]
struct Transfer {
    name: String,
    entered: Vec<usize>,
    missing: Vec<usize>,
    age_seconds: f64,
    is_blocking: bool,
}

impl JobState {
    /// The state of a job at this time.
    pub(crate) fn new(metrics: &JobMetrics, time: SystemTime) -> JobState {
        let lead = metrics.lead();
        let statuses: Vec<RankStatus> = metrics.ranks.values().cloned().collect();
        let of_lead = |value: fn(&Heartbeat) -> Option<f64>| lead.and_then(value);
        JobState {
            status: job_status(metrics),
            world_size: metrics.world.map(|world| world.size),
            epoch: metrics.world.and_then(|world| world.epoch),
            step: metrics.step(),
            num_steps: lead.map(|lead| lead.num_steps).filter(|num| *num > 0),
            loss: of_lead(|lead| lead.loss),
            is_loss_invalid: lead.is_some_and(|lead| lead.metrics.is_loss_invalid),
            grad_norm: of_lead(|lead| lead.metrics.grad_norm),
            learning_rate: of_lead(|lead| lead.metrics.learning_rate),
            tokens_per_second: metrics.tokens_per_second(),
            mfu: of_lead(|lead| lead.metrics.mfu),
            step_seconds: of_lead(mean_step_seconds),
            data_wait: of_lead(|lead| lead.metrics.data_wait_fraction),
            peak_bytes: metrics.peak_bytes(),
            useful_seconds: metrics.goodput().useful_seconds(),
            lost_steps: metrics.goodput().lost_steps(),
            restarts: metrics.restarts.values().sum(),
            checkpoint: checkpoint(metrics, time),
            mesh: lead.map(|lead| lead.mesh.clone()).unwrap_or_default(),
            ranks: ranks(metrics),
            memory: memory(&statuses),
            in_flight: in_flight(&statuses),
        }
    }
}

fn job_status(metrics: &JobMetrics) -> JobStatus {
    let mut stages = metrics.ranks.values().map(|status| status.heartbeat.stage);
    if !metrics.is_running {
        JobStatus::Stopped
    } else if stages.any(|stage| stage != Stage::Starting) {
        JobStatus::Running
    } else {
        JobStatus::Starting
    }
}

fn mean_step_seconds(heartbeat: &Heartbeat) -> Option<f64> {
    let times = &heartbeat.metrics.step_times;
    (times.count() > 0).then(|| times.sum_seconds / times.count() as f64)
}

fn checkpoint(metrics: &JobMetrics, time: SystemTime) -> Option<Checkpoint> {
    let save = metrics.last_save?;
    let now = time.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    Some(Checkpoint {
        step: save.step,
        age_seconds: (now.as_secs_f64() - save.unix_seconds).max(0.0),
        pause_seconds: save.pause_seconds,
    })
}

fn ranks(metrics: &JobMetrics) -> Vec<RankState> {
    let is_small = metrics.ranks.len() <= MAX_DESCRIBED;
    let ranks = metrics.ranks.iter().map(|(rank, status)| {
        let health = health(status, metrics.slow.contains(rank));
        RankState {
            rank: *rank,
            status: health,
            wait: status.heartbeat.busy_fraction.map(|busy| 1.0 - busy),
            text: (is_small || health != RankHealth::Healthy).then(|| describe(&status.heartbeat)),
        }
    });
    ranks.collect()
}

fn describe(heartbeat: &Heartbeat) -> String {
    match &heartbeat.position {
        Some(position) => format!("{}, at {position}", heartbeat.describe()),
        None => heartbeat.describe(),
    }
}

/// Whether steps take much longer than usual, so that the last measurements say nothing about the present.
pub(super) fn is_stuck(metrics: &JobMetrics) -> bool {
    let mut healths = metrics.ranks.values().map(|status| health(status, false));
    healths.any(|health| matches!(health, RankHealth::Stalled | RankHealth::NotRunning))
}

fn health(status: &RankStatus, is_slow: bool) -> RankHealth {
    let heartbeat = &status.heartbeat;
    let usual = Duration::from_nanos(heartbeat.usual_step_ns().unwrap_or_default());
    let is_stalled = usual > Duration::ZERO
        && status.stalled_for >= usual.saturating_mul(STALLED_STEPS).max(MIN_STALL);
    match heartbeat.stage {
        Stage::Ended => RankHealth::Ended,
        _ if status.is_frozen() => RankHealth::NotRunning,
        Stage::Starting => RankHealth::Starting,
        Stage::Stepping | Stage::Observed if is_stalled => RankHealth::Stalled,
        _ if is_slow => RankHealth::Straggler,
        _ => RankHealth::Healthy,
    }
}

fn memory(statuses: &[RankStatus]) -> Vec<RankMemory> {
    let ranks = statuses.iter().filter_map(|status| {
        Some(RankMemory {
            rank: status.heartbeat.rank,
            peak_bytes: status.heartbeat.peak_bytes?,
            kinds: status.heartbeat.metrics.peak_memory.clone(),
        })
    });
    let mut ranks: Vec<RankMemory> = ranks.collect();
    ranks.sort_by_key(|memory| std::cmp::Reverse(memory.peak_bytes));
    ranks.truncate(MAX_MEMORY_ROWS);
    ranks.sort_by_key(|memory| memory.rank);
    ranks
}

fn in_flight(statuses: &[RankStatus]) -> Vec<Transfer> {
    let mut all = collectives_in_flight(statuses);
    // First those that ranks are missing from: the others may wait for them.
    all.sort_by_key(|collective| {
        let is_waited_for = collective.blocked_for.is_some() && !collective.missing.is_empty();
        (!is_waited_for, std::cmp::Reverse(collective.age))
    });
    all.truncate(MAX_IN_FLIGHT);
    let transfer = |collective: CollectiveInFlight| Transfer {
        name: collective.to_string(),
        age_seconds: collective.age.as_secs_f64(),
        is_blocking: collective.blocked_for.is_some(),
        entered: collective.entered,
        missing: collective.missing,
    };
    all.into_iter().map(transfer).collect()
}

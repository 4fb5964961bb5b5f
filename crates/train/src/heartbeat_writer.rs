//! A thread that writes heartbeats: the stage and step of the training loop, and pending collectives.
//!
//! It runs beside the loop, so that a heartbeat is written even while the loop hangs. The launcher has the memory for
//! the [`Heartbeat`]; without a launcher no thread is started.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use trainyard_heartbeat::{
    Heartbeat, HeartbeatSlot, MemoryUse, MeshAxis, PendingCollective, Save, SentBytes, Stage,
    StepTimeStats,
};
use trainyard_mesh::{Axis, AxisSet, Mesh};
use trainyard_torch::{World, memory};
use trainyard_trace::Ledger;

use crate::metrics::StepMetrics;
use crate::train_spec::TrainSpec;

/// Time between heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(100);

/// Writes the heartbeats of this rank until it is dropped. Does nothing without a launcher.
pub(crate) struct HeartbeatWriter(Option<Running>);

struct Running {
    ledger: Ledger,
    state: Arc<Mutex<State>>,
    /// Dropped to stop the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The last state that the training loop reported.
struct State {
    heartbeat: Heartbeat,
    step_times: StepTimeStats,
    /// Total time spent waiting for collectives when the current stage began.
    waited_ns: u64,
}

impl HeartbeatWriter {
    /// Starts the thread if a launcher started this rank.
    pub fn from_env(world: &World, spec: &TrainSpec) -> HeartbeatWriter {
        let slot = HeartbeatSlot::from_env().unwrap_or_else(|error| {
            tracing::warn!("this rank has no heartbeat: {error}");
            None
        });
        HeartbeatWriter(slot.and_then(|slot| Running::start(slot, world, spec)))
    }

    /// Records that the loop enters another stage or step.
    pub fn enter(&self, stage: Stage, step: u64) {
        if let Some(running) = &self.0 {
            let (now_ns, waited_ns) = (running.ledger.now_ns(), running.ledger.waited_ns());
            lock(&running.state).enter(stage, step, now_ns, waited_ns);
        }
    }

    /// Records the metrics of a reported step.
    pub fn report(&self, step: &StepMetrics) {
        if let Some(running) = &self.0 {
            let heartbeat = &mut lock(&running.state).heartbeat;
            heartbeat.loss = Some(step.loss);
            heartbeat.tokens_per_second = Some(step.tps);
            heartbeat.peak_bytes = Some(step.memory_bytes);
            let metrics = &mut heartbeat.metrics;
            metrics.is_loss_invalid = !step.loss.is_finite();
            metrics.grad_norm = Some(step.grad_norm);
            metrics.learning_rate = Some(step.lr);
            metrics.mfu = step.mfu;
            metrics.data_wait_fraction = Some(step.data_share);
            metrics.peak_memory = peak_memory();
        }
    }

    /// Records that the state of `step` was saved to storage, and how long training paused for it.
    pub fn saved(&self, step: u64, pause: Duration) {
        if let Some(running) = &self.0 {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            lock(&running.state).heartbeat.metrics.last_save = Some(Save {
                step,
                pause_seconds: pause.as_secs_f64(),
                unix_seconds: now.unwrap_or_default().as_secs_f64(),
            });
        }
    }
}

impl Running {
    /// `None` if the thread cannot be started: a job can run without heartbeats.
    fn start(slot: HeartbeatSlot, world: &World, spec: &TrainSpec) -> Option<Running> {
        let ledger = world.ledger().clone();
        let heartbeat = Heartbeat {
            rank: world.rank(),
            since_ns: ledger.now_ns(),
            num_steps: spec.training.steps,
            shows_progress: spec.metrics.progress,
            mesh: mesh_axes(world.mesh()),
            ..Heartbeat::default()
        };
        let state = Arc::new(Mutex::new(State {
            heartbeat,
            step_times: StepTimeStats::default(),
            waited_ns: 0,
        }));
        let write_loop = WriteLoop {
            slot,
            mesh: world.mesh().clone(),
            ledger: ledger.clone(),
            state: Arc::clone(&state),
        };
        let (stop, stopped) = channel();
        let thread = thread::Builder::new().name("heartbeat".to_owned());
        let thread = thread.spawn(move || write_loop.run_until(&stopped)).ok()?;
        Some(Running {
            ledger,
            state,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl State {
    fn enter(&mut self, stage: Stage, step: u64, now_ns: u64, waited_ns: u64) {
        if self.heartbeat.stage == Stage::Stepping {
            let since = |now: u64, then: u64| Duration::from_nanos(now.saturating_sub(then));
            let waited = since(waited_ns, self.waited_ns);
            let took = since(now_ns, self.heartbeat.since_ns);
            self.step_times.record(took, waited);
            self.heartbeat.metrics.step_times.record(took);
        }
        (self.heartbeat.stage, self.heartbeat.step) = (stage, step);
        (self.heartbeat.since_ns, self.waited_ns) = (now_ns, waited_ns);
    }

    /// The heartbeat to write, with the step time statistics.
    fn snapshot(&self) -> Heartbeat {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Heartbeat {
            p99_step_ns: self.step_times.p99().map(nanoseconds),
            max_step_ns: self.step_times.early_max().map(nanoseconds),
            busy_fraction: self.step_times.busy_fraction(),
            ..self.heartbeat.clone()
        }
    }
}

fn mesh_axes(mesh: &Mesh) -> Vec<MeshAxis> {
    let axes = Axis::ALL.into_iter().filter(|axis| mesh.size(*axis) > 1);
    let axes = axes.map(|axis| MeshAxis {
        name: axis.to_string(),
        size: mesh.size(axis),
    });
    axes.collect()
}

/// The memory at the peak by kind, if allocations are counted.
fn peak_memory() -> Vec<MemoryUse> {
    let Ok(report) = memory::report() else {
        return Vec::new();
    };
    let kinds = memory::KINDS.into_iter().zip(report.at_peak);
    let used = kinds.filter(|(_, bytes)| *bytes > 0);
    let used = used.map(|(kind, bytes)| MemoryUse {
        kind: kind.to_string(),
        bytes,
    });
    used.collect()
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The body of the thread.
struct WriteLoop {
    slot: HeartbeatSlot,
    mesh: Mesh,
    ledger: Ledger,
    state: Arc<Mutex<State>>,
}

impl WriteLoop {
    /// Writes a heartbeat per interval, and a last one on stop, which has the final stage of the job.
    fn run_until(self, stopped: &Receiver<()>) {
        loop {
            self.write_heartbeat();
            if stopped.recv_timeout(HEARTBEAT_INTERVAL) != Err(RecvTimeoutError::Timeout) {
                return self.write_heartbeat();
            }
        }
    }

    fn write_heartbeat(&self) {
        let mut heartbeat = lock(&self.state).snapshot();
        heartbeat.pending = self.pending_collectives();
        heartbeat.completed = self.ledger.last_completed();
        heartbeat.metrics.sent_bytes = self.sent_bytes();
        if let Err(error) = self.slot.write(&mut heartbeat) {
            tracing::debug!("cannot write a heartbeat: {error}");
        }
    }

    fn sent_bytes(&self) -> Vec<SentBytes> {
        let sent = self.ledger.sent_bytes().into_iter();
        let sent = sent.map(|(group, purpose, bytes)| SentBytes {
            purpose: purpose.to_string(),
            group,
            bytes,
        });
        sent.collect()
    }

    fn pending_collectives(&self) -> Vec<PendingCollective> {
        let pending = self.ledger.pending();
        let collectives = pending.iter().map(|pending| {
            let axes: Option<AxisSet> = pending.group.parse().ok();
            let members = axes.and_then(|axes| self.mesh.group(self.ledger.rank(), axes).ok());
            PendingCollective::new(pending, members.unwrap_or_default())
        });
        collectives.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_training_steps_count_as_step_times() {
        let mut state = State {
            heartbeat: Heartbeat::default(),
            step_times: StepTimeStats::default(),
            waited_ns: 0,
        };
        let second = 1_000_000_000;
        let mut now = 100 * second;
        for step in 1..=6 {
            state.enter(Stage::Stepping, step, now, 0);
            now += second;
            state.enter(Stage::Between, step, now, 0);
            now += 60 * second;
        }
        assert_eq!(state.step_times.p99(), Some(Duration::from_secs(1)));
        assert_eq!(state.heartbeat.metrics.step_times.count(), 6);
    }
}

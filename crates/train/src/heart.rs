//! A thread that tells from outside the loop where the loop is.
//!
//! The launcher names the folder for its [`Pulse`]s; without one there is nobody to tell, and no thread.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use trainyard_mesh::{AxisSet, Mesh};
use trainyard_torch::World;
use trainyard_trace::{Entered, Ledger, PULSE_FOLDER, Pace, Pulse, Stage};

/// How often a pulse is written.
const EVERY: Duration = Duration::from_millis(100);

/// Beats as long as it lives.
pub(crate) struct Heart(Option<Beating>);

struct Beating {
    ledger: Ledger,
    state: Arc<Mutex<State>>,
    /// Dropped to stop the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What the loop last said of itself.
struct State {
    pulse: Pulse,
    pace: Pace,
    /// How long collectives were waited for before the step under way.
    waited_ns: u64,
}

impl Heart {
    /// Beats into the folder that the launcher names.
    pub fn from_env(world: &World, num_steps: u64) -> Heart {
        let folder = std::env::var_os(PULSE_FOLDER).map(PathBuf::from);
        Heart(folder.and_then(|folder| Beating::start(folder, world, num_steps)))
    }

    /// The loop is at something else now.
    pub fn enter(&self, stage: Stage, step: u64) {
        if let Some(beating) = &self.0 {
            let (now_ns, waited_ns) = (beating.ledger.now_ns(), beating.ledger.waited_ns());
            lock(&beating.state).enter(stage, step, now_ns, waited_ns);
        }
    }

    /// What the last report said.
    pub fn report(&self, loss: f64, tokens_per_second: f64, peak_bytes: u64) {
        if let Some(beating) = &self.0 {
            let pulse = &mut lock(&beating.state).pulse;
            pulse.loss = Some(loss);
            pulse.tokens_per_second = Some(tokens_per_second);
            pulse.peak_bytes = Some(peak_bytes);
        }
    }
}

impl Beating {
    /// None where no thread can be had: a job does not end for that.
    fn start(folder: PathBuf, world: &World, num_steps: u64) -> Option<Beating> {
        let ledger = world.ledger().clone();
        let pulse = Pulse {
            rank: world.rank(),
            since_ns: ledger.now_ns(),
            num_steps,
            ..Pulse::default()
        };
        let state = Arc::new(Mutex::new(State {
            pulse,
            pace: Pace::default(),
            waited_ns: 0,
        }));
        let writer = Writer {
            folder,
            mesh: world.mesh().clone(),
            ledger: ledger.clone(),
            state: Arc::clone(&state),
        };
        let (stop, stopped) = channel();
        let thread = thread::Builder::new().name("heart".to_owned());
        let thread = thread.spawn(move || writer.until(&stopped)).ok()?;
        Some(Beating {
            ledger,
            state,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Beating {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl State {
    fn enter(&mut self, stage: Stage, step: u64, now_ns: u64, waited_ns: u64) {
        if self.pulse.stage == Stage::Stepping {
            let since = |now: u64, then: u64| Duration::from_nanos(now.saturating_sub(then));
            let waited = since(waited_ns, self.waited_ns);
            self.pace.saw(since(now_ns, self.pulse.since_ns), waited);
        }
        (self.pulse.stage, self.pulse.step) = (stage, step);
        (self.pulse.since_ns, self.waited_ns) = (now_ns, waited_ns);
    }

    /// The pulse with what the pace says.
    fn told(&self) -> Pulse {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Pulse {
            p99_ns: self.pace.p99().map(nanoseconds),
            longest_ns: self.pace.longest_of_few().map(nanoseconds),
            work_share: self.pace.work_share(),
            ..self.pulse.clone()
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the thread needs.
struct Writer {
    folder: PathBuf,
    mesh: Mesh,
    ledger: Ledger,
    state: Arc<Mutex<State>>,
}

impl Writer {
    /// Once more when it is told to stop, so that the last pulse says how it ended.
    fn until(self, stopped: &Receiver<()>) {
        loop {
            self.beat();
            if stopped.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
                return self.beat();
            }
        }
    }

    fn beat(&self) {
        let mut pulse = lock(&self.state).told();
        pulse.entered = self.entered();
        pulse.passed = self.ledger.passed();
        // A full disk must not stop a job; the launcher then sees an old pulse.
        if let Err(error) = pulse.write(&self.folder) {
            tracing::debug!("cannot write a pulse to {}: {error}", self.folder.display());
        }
    }

    fn entered(&self) -> Vec<Entered> {
        let pending = self.ledger.pending();
        let entered = pending.iter().map(|pending| {
            let axes: Option<AxisSet> = pending.group.parse().ok();
            let members = axes.and_then(|axes| self.mesh.group(self.ledger.rank(), axes).ok());
            Entered::new(pending, members.unwrap_or_default())
        });
        entered.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_steps_set_the_pace() {
        let mut state = State {
            pulse: Pulse::default(),
            pace: Pace::default(),
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
        assert_eq!(state.pace.p99(), Some(Duration::from_secs(1)));
    }
}

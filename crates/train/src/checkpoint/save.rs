//! Asynchronous checkpointing: files are written while training continues.
//!
//! A save copies this rank's shards into a staging buffer; then training continues, and a thread writes
//! the buffer to one or more destinations. Ranks report what they have written to rank 0 through the job's
//! key-value store, each with the rank's tag, because collectives on a second thread could interleave with those of training. Rank 0
//! commits the checkpoint. A save that fails is logged, training continues, and the next save is not
//! affected.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use trainyard_checkpoint::{
    CheckpointError, MANIFEST, Ownership, Shard, Store, TrainState, check_files, commit,
    lacking_bytes, retain, step_dir, write_shard,
};
use trainyard_config::{Config, Names};
use trainyard_optim::Optimizer;
use trainyard_parallel::Strategy;
use trainyard_torch::{Store as KvStore, TorchError, World};
use trainyard_trace::readable_bytes;

use super::report_keys::ReportKeys;
use super::save_plan::{Beside, assign_writes, local_state};
use super::staging::{Buffer, Staged};
use crate::error::{Result, TrainError};
use crate::fingerprint::fingerprint;
use crate::trainer::Trainer;

/// How long rank 0 waits for the report of another rank.
const REPORT_TIMEOUT: Duration = Duration::from_secs(3600);
/// How long rank 0 waits for a rank's own report after it has read a forged one.
const FORGED_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a waiting rank checks whether the job is shutting down.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The cost of a save for the training loop.
#[derive(Debug, Clone, Copy)]
pub struct SaveStats {
    /// Time for which training was paused.
    pub pause: Duration,
    /// Host memory of the staging buffer.
    pub staging_bytes: u64,
}

/// Where checkpoints are saved.
#[derive(Clone, Debug)]
pub struct Destination {
    /// The storage that the files are written to.
    pub store: Arc<dyn Store>,
    /// How many checkpoints are kept; 0 keeps all.
    pub keep: usize,
    /// Whether training continues while files are written.
    pub is_async: bool,
    /// Whether the storage outlives the job. If so, a job whose last checkpoint could not be saved fails.
    pub is_durable: bool,
    /// The claim of rank 0 to the storage; without one the storage is not guarded against other jobs.
    pub owner: Option<Arc<Ownership>>,
}

/// Saves the checkpoints of a job, one at a time.
pub struct Saver {
    /// Carries the reports of the ranks; `None` in a job of one rank.
    reports: Option<Reports>,
    rank: usize,
    num_ranks: usize,
    num_saves: u64,
    /// The step of the last save.
    last_step: Option<u64>,
    /// The staging buffer, while no save is in flight.
    staging: Option<Buffer>,
    in_flight: Option<JoinHandle<Outcome>>,
    /// The latest step that could not be saved in durable storage.
    failed_step: Option<u64>,
    /// Receives a message when the save in flight has reached its first destination.
    first_done: Option<Receiver<()>>,
    /// Set when the job ends: no thread waits for other ranks any more.
    is_shutdown: Arc<AtomicBool>,
    /// Whether a save has checked that storage has room for those to come.
    knows_room: Arc<AtomicBool>,
}

/// What the thread returns: the staging buffer, and the result at every destination.
type Outcome = (Buffer, Vec<(Destination, Result<(), CheckpointError>)>);

impl Saver {
    /// A saver for the ranks of `world`. This is a collective call.
    pub fn new(world: &World) -> Result<Saver> {
        // A job may have had other savers, whose reports must not be mistaken for those of this one.
        // All ranks have created the same number of savers.
        let rank = world.rank();
        let reports = match world.side_store("checkpoint")? {
            Some(all) => {
                let number = all.add(&format!("savers of rank {rank}"), 1)?;
                Some(Reports {
                    store: all.prefixed(&format!("saver {number}"))?,
                    keys: ReportKeys::exchange(world)?,
                })
            }
            None => None,
        };
        Ok(Saver {
            reports,
            rank: world.rank(),
            num_ranks: world.size(),
            num_saves: 0,
            last_step: None,
            staging: None,
            in_flight: None,
            failed_step: None,
            first_done: None,
            is_shutdown: Arc::default(),
            knows_room: Arc::default(),
        })
    }

    /// Saves the state of `trainer` at all destinations, staging it once. This is a collective call: all
    /// ranks must pass the same state and destinations.
    pub fn save(
        &mut self,
        trainer: &Trainer,
        world: &World,
        state: TrainState,
        destinations: &[Destination],
    ) -> Result<SaveStats> {
        let beside = Beside {
            states: &trainer.param_states()?,
            outer_group: trainer.outer_group(),
        };
        let trained = (trainer.model(), trainer.optimizer());
        self.save_model(trained, beside, world, state, destinations)
    }

    /// The same for a model and an optimizer.
    pub(super) fn save_model(
        &mut self,
        (model, optimizer): (&dyn Strategy, &dyn Optimizer),
        beside: Beside<'_>,
        world: &World,
        state: TrainState,
        destinations: &[Destination],
    ) -> Result<SaveStats> {
        let began = Instant::now();
        self.finish();
        if self.last_step.replace(state.step) == Some(state.step) {
            self.wait_for_cleanup()?;
        }
        model.wait_pending()?;
        let own = assign_writes(
            local_state(model, optimizer, beside, world)?,
            world.mesh(),
            world.rank(),
        )?;
        let buffer = match self.staging.take() {
            Some(buffer) => buffer,
            None => Buffer::new(world.device())?,
        };
        let staged = Staged::new(buffer, &own, world.device(), (model, optimizer))?;
        let staging_bytes = staged.num_bytes();
        let task = |(destination, number): (&Destination, u64)| Task {
            destination: destination.clone(),
            reports: self.reports.clone(),
            rank: self.rank,
            num_ranks: self.num_ranks,
            number,
            is_shutdown: Arc::clone(&self.is_shutdown),
            knows_room: Arc::clone(&self.knows_room),
            state: state.clone(),
        };
        let tasks: Vec<Task> = destinations
            .iter()
            .zip(self.num_saves..)
            .map(task)
            .collect();
        self.num_saves += tasks.len() as u64;
        let thread = std::thread::Builder::new().name("checkpoint".to_owned());
        let (notify, first_done) = channel();
        let spawned = thread.spawn(move || {
            let run = |task: &Task| {
                let outcome = task.run(&staged);
                // The receiver is dropped if the caller does not wait.
                let _ = notify.send(());
                (task.destination.clone(), outcome)
            };
            let outcomes = tasks.iter().map(run).collect();
            (staged.buffer, outcomes)
        });
        self.first_done = Some(first_done);
        self.in_flight = Some(spawned.map_err(TrainError::io(Path::new("checkpoint thread")))?);
        if destinations.iter().any(|destination| !destination.is_async) {
            self.finish();
        }
        Ok(SaveStats {
            pause: began.elapsed(),
            staging_bytes,
        })
    }

    /// Waits until rank 0 has removed stale files after the last save. It would mistake the files of another
    /// save of the same step, which are in the same directory, for those of an interrupted save.
    fn wait_for_cleanup(&self) -> Result<()> {
        let Some(reports) = &self.reports else {
            return Ok(());
        };
        let key = format!("cleaned up before save {}", self.num_saves);
        if self.rank == 0 {
            return Ok(reports.store.set(&key, b"yes")?);
        }
        wait_for_key(&reports.store, &key, &self.is_shutdown)?;
        Ok(())
    }

    /// Waits until the save in flight has completed or failed at its first destination.
    pub fn wait_for_first(&mut self) {
        if let Some(first_done) = self.first_done.take() {
            // An error means that the thread panicked; `finish` logs it.
            let _ = first_done.recv();
        }
    }

    /// Waits for the save in flight, and logs a failure.
    pub fn finish(&mut self) {
        let Some(thread) = self.in_flight.take() else {
            return;
        };
        let Ok((staging, outcomes)) = thread.join() else {
            tracing::error!("cannot save the checkpoint: the checkpoint thread panicked");
            self.failed_step = self.last_step;
            return;
        };
        self.staging = Some(staging);
        for (destination, outcome) in outcomes {
            let Err(error) = outcome else { continue };
            tracing::error!("cannot save the checkpoint: {error}");
            if destination.is_durable {
                self.failed_step = self.last_step;
            }
        }
    }

    /// Whether the checkpoint of `step` could not be saved in durable storage.
    pub fn has_failed(&self, step: u64) -> bool {
        self.failed_step == Some(step)
    }
}

impl Drop for Saver {
    /// After an error elsewhere, other ranks may never send their reports.
    fn drop(&mut self) {
        self.is_shutdown.store(true, Ordering::Relaxed);
        self.finish();
    }
}

/// Waits for the value that another rank sets, until the timeout or the end of the job.
fn wait_for_key(
    side_store: &KvStore,
    key: &str,
    is_shutdown: &AtomicBool,
) -> Result<Vec<u8>, TorchError> {
    let began = Instant::now();
    loop {
        match side_store.get_with_timeout(key, POLL_INTERVAL) {
            Err(_) if began.elapsed() < REPORT_TIMEOUT && !is_shutdown.load(Ordering::Relaxed) => {}
            value => return value,
        }
    }
}

/// One save at one destination, which the checkpoint thread runs.
struct Task {
    destination: Destination,
    reports: Option<Reports>,
    rank: usize,
    num_ranks: usize,
    number: u64,
    is_shutdown: Arc<AtomicBool>,
    knows_room: Arc<AtomicBool>,
    state: TrainState,
}

/// The fingerprint of the job that wrote a checkpoint; `None` if this build does not understand its config.
fn fingerprint_of(state: &TrainState) -> Option<String> {
    fingerprint(&Config::parse_with(&state.config, &[], &Names::any()).ok()?).ok()
}

/// How ranks send their reports to rank 0.
#[derive(Clone)]
struct Reports {
    store: KvStore,
    keys: ReportKeys,
}

/// What a rank reports to rank 0.
#[derive(Serialize, Deserialize)]
enum Report {
    Written(Shard),
    Failed(String),
}

impl Task {
    fn run(&self, staged: &Staged) -> Result<(), CheckpointError> {
        let began = Instant::now();
        let written = self.write(staged);
        let report = match &written {
            Ok(shard) => Report::Written(shard.clone()),
            Err(error) => Report::Failed(error.to_string()),
        };
        self.send_report(&report)?;
        if self.rank > 0 {
            return written.map(drop);
        }
        let others = (1..self.num_ranks).map(|rank| self.receive_report(rank));
        // Every report is awaited: after a failure no rank may still be writing.
        let shards: Vec<Result<Shard, _>> = std::iter::once(written).chain(others).collect();
        let store = &*self.destination.store;
        let (folder, num_bytes) = match self.commit(shards.into_iter().collect()) {
            Ok(committed) => committed,
            Err(error) => {
                self.discard();
                return Err(error);
            }
        };
        let seconds = began.elapsed().as_secs_f64();
        tracing::info!(
            "saved {}: {} in {seconds:.2} s",
            store.describe(&folder),
            readable_bytes(num_bytes)
        );
        let cleaned = self.check_owner().and_then(|()| self.retain(store));
        if let Err(error) = cleaned {
            tracing::warn!("cannot delete older checkpoints: {error}");
        }
        if self.destination.is_durable && !self.knows_room.swap(true, Ordering::Relaxed) {
            self.warn_if_full(num_bytes);
        }
        Ok(())
    }

    /// Deletes what the destination no longer keeps. Storage that is not durable belongs to this job alone.
    fn retain(&self, store: &dyn Store) -> Result<(), CheckpointError> {
        let own = fingerprint_of(&self.state);
        let is_own = |state: &TrainState| fingerprint_of(state) == own;
        let is_own: &dyn Fn(&TrainState) -> bool = &is_own;
        let is_own = self.destination.is_durable.then_some(is_own);
        retain(store, self.state.step, self.destination.keep, is_own)
    }

    /// After the first save its size is known, so it is known whether the disk will be full.
    fn warn_if_full(&self, num_bytes: u64) {
        let (store, keep) = (&*self.destination.store, self.destination.keep);
        if let Ok(Some(lack)) = lacking_bytes(store, self.state.step, num_bytes, keep) {
            let kept = match keep {
                0 => "the next checkpoint".to_owned(),
                keep => format!("the {keep} checkpoints of checkpoint.keep_latest_k and one more"),
            };
            tracing::warn!(
                "{} has no room for {kept}: free {}, or later saves will fail",
                store.describe(""),
                readable_bytes(lack)
            );
        }
    }

    /// Commits the shards of all ranks: the directory and the size of the checkpoint.
    fn commit(
        &self,
        shards: Result<Vec<Shard>, CheckpointError>,
    ) -> Result<(String, u64), CheckpointError> {
        let (shards, store) = (shards?, &*self.destination.store);
        self.check_owner()?;
        if self.destination.is_durable {
            check_files(store, self.state.step, &shards)?;
        }
        let num_bytes = shards.iter().map(|shard| shard.entry.num_bytes).sum();
        Ok((commit(store, self.state.clone(), shards)?, num_bytes))
    }

    /// Deletes what a failed save has written, which takes the space that the next one needs. An older checkpoint of
    /// the same step stays.
    fn discard(&self) {
        let store = &*self.destination.store;
        let folder = step_dir(self.state.step);
        let discarded = self.check_owner().and_then(|()| {
            match store.size(&format!("{folder}/{MANIFEST}"))? {
                Some(_) => Ok(()),
                None => store.remove_dir(&folder),
            }
        });
        if let Err(error) = discarded {
            tracing::warn!("cannot delete what the failed save has written: {error}");
        }
    }

    /// Fails if another job has taken over the checkpoint folder.
    fn check_owner(&self) -> Result<(), CheckpointError> {
        match &self.destination.owner {
            Some(owner) => owner.check(&*self.destination.store),
            None => Ok(()),
        }
    }

    fn write(&self, staged: &Staged) -> Result<Shard, CheckpointError> {
        staged.wait().map_err(|e| self.failed(self.rank, e))?;
        // Every attempt has a file name of its own, so that files of an earlier attempt stay intact until
        // this one is committed.
        let attempt = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |time| time.as_nanos());
        let file = format!("rank{:05}-{attempt:x}.safetensors", self.rank);
        let folder = step_dir(self.state.step);
        write_shard(
            &*self.destination.store,
            &folder,
            &file,
            &staged.items,
            staged,
        )
    }

    fn key(&self, rank: usize) -> String {
        format!("{}/{rank}", self.number)
    }

    fn send_report(&self, report: &Report) -> Result<(), CheckpointError> {
        let Some(reports) = self.reports.as_ref().filter(|_| self.rank > 0) else {
            return Ok(());
        };
        let text = serde_json::to_vec(report).map_err(|e| self.failed(self.rank, e))?;
        let key = self.key(self.rank);
        let sealed = reports.keys.seal(self.rank, &key, &text);
        let sent = reports.store.set(&key, &sealed);
        sent.map_err(|e| self.failed(self.rank, e))
    }

    fn receive_report(&self, rank: usize) -> Result<Shard, CheckpointError> {
        let Some(Reports { store, keys }) = &self.reports else {
            return Err(self.failed(rank, "there is no key-value store for its report"));
        };
        let key = self.key(rank);
        let text = self.wait_for_report(store, keys, rank, &key)?;
        // Reports are long, and the store keeps them in memory.
        store.set(&key, b"").map_err(|e| self.failed(rank, e))?;
        match serde_json::from_slice(&text).map_err(|e| self.failed(rank, e))? {
            Report::Written(shard) => Ok(shard),
            Report::Failed(reason) => Err(self.failed(rank, reason)),
        }
    }

    /// Waits for a report that the rank itself has written. It replaces one that another process wrote before.
    fn wait_for_report(
        &self,
        store: &KvStore,
        keys: &ReportKeys,
        rank: usize,
        key: &str,
    ) -> Result<Vec<u8>, CheckpointError> {
        let mut forged_since = None;
        loop {
            let sealed = wait_for_key(store, key, &self.is_shutdown);
            let sealed = sealed.map_err(|e| self.failed(rank, e))?;
            if let Some(report) = keys.open(rank, key, &sealed) {
                return Ok(report.to_vec());
            }
            let reason = "its report is forged: another process writes to the workers' store";
            let since = *forged_since.get_or_insert_with(|| {
                tracing::warn!("rank {rank}: {reason}; waiting for the rank's own");
                Instant::now()
            });
            if since.elapsed() > FORGED_TIMEOUT || self.is_shutdown.load(Ordering::Relaxed) {
                return Err(self.failed(rank, reason));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn failed(&self, rank: usize, reason: impl ToString) -> CheckpointError {
        CheckpointError::Rank {
            path: self.destination.store.describe(&step_dir(self.state.step)),
            rank,
            reason: reason.to_string(),
        }
    }
}

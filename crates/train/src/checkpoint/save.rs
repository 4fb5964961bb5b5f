//! Saving while training goes on.
//!
//! What this rank writes is copied into memory that is kept for it; a thread writes that out, to one
//! place or to several, and the next step begins. Ranks tell the first one what they have written through the job's store, not by
//! collectives, which belong to training; the first one makes it a checkpoint. A save that fails is
//! told and forgotten: the job goes on, and the next one is tried as if nothing had been.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use trainyard_checkpoint::{
    CheckpointError, Elements, Part, Shard, Store, TrainState, commit, retain, step_folder,
    write_shard,
};
use trainyard_torch::{Store as Meeting, TorchError, World, bytes};
use trainyard_trace::readable_bytes;

use super::held::{held, written};
use crate::error::{Result, TrainError};
use crate::trainer::Trainer;

/// How long the first rank waits for what another has written, and how long between looks at whether
/// it still should.
const PATIENCE: Duration = Duration::from_secs(3600);
const GLANCE: Duration = Duration::from_secs(1);

/// What a save has cost the job.
#[derive(Debug, Clone, Copy)]
pub struct Saved {
    /// How long training stood still.
    pub pause: Duration,
    /// Memory that holds the copy.
    pub staging_bytes: u64,
}

/// Where a state is saved.
#[derive(Clone, Debug)]
pub struct Destination {
    /// The place.
    pub store: Arc<dyn Store>,
    /// How many stay there; 0 keeps all.
    pub keep: usize,
    /// Whether training goes on while files are written.
    pub is_async: bool,
    /// Whether what is there outlives the job, so that losing its last state is worth an error.
    pub is_lasting: bool,
}

/// Saves a job's state, one at a time.
pub struct Saver {
    /// How ranks tell each other what they have written; none where there is one.
    meeting: Option<Meeting>,
    rank: usize,
    num_ranks: usize,
    num_saves: u64,
    /// The step that was saved last.
    last: Option<u64>,
    /// Memory for the copy, when no save is under way.
    staging: Vec<u8>,
    under_way: Option<JoinHandle<Outcome>>,
    /// The newest step that could not be saved in a place that lasts.
    lost: Option<u64>,
    /// Tells when the save under way is in its first place.
    first: Option<Receiver<()>>,
    /// Set when the job ends: nobody waits for others any more.
    is_over: Arc<AtomicBool>,
}

/// What the thread leaves: the memory, and how it went in every place.
type Outcome = (Vec<u8>, Vec<(Destination, Result<(), CheckpointError>)>);

impl Saver {
    /// Saves what these ranks hold.
    pub fn new(world: &World) -> Result<Saver> {
        // A job may have had other savers, whose reports must not be taken for this one's. All ranks
        // have had as many.
        let rank = world.rank();
        let meeting = world.meeting("checkpoint")?;
        let meeting = match &meeting {
            Some(all) => {
                let number = all.add(&format!("savers of rank {rank}"), 1)?;
                Some(all.prefixed(&format!("saver {number}"))?)
            }
            None => None,
        };
        Ok(Saver {
            meeting,
            rank: world.rank(),
            num_ranks: world.size(),
            num_saves: 0,
            last: None,
            staging: Vec::new(),
            under_way: None,
            lost: None,
            first: None,
            is_over: Arc::default(),
        })
    }

    /// Saves the state of `trainer` in all these places, of one copy. All ranks must ask, for the same.
    pub fn save(
        &mut self,
        trainer: &Trainer,
        world: &World,
        state: TrainState,
        places: &[Destination],
    ) -> Result<Saved> {
        let began = Instant::now();
        self.finish();
        if self.last.replace(state.step) == Some(state.step) {
            self.wait_for_tidying()?;
        }
        trainer.settle()?;
        let own = written(held(trainer, world)?, world.mesh(), world.rank())?;
        let mut staged = Staged::new(std::mem::take(&mut self.staging));
        for item in &own {
            let tensor = item.tensor.f_contiguous()?;
            let place = staged.append(&item.part);
            bytes::copy_out(&tensor, 0, place)
                .map_err(TrainError::io(Path::new(&item.part.name)))?;
        }
        let staging_bytes = staged.bytes.len() as u64;
        let task = |(place, number): (&Destination, u64)| Task {
            place: place.clone(),
            meeting: self.meeting.clone(),
            rank: self.rank,
            num_ranks: self.num_ranks,
            number,
            is_over: Arc::clone(&self.is_over),
            state: state.clone(),
        };
        let tasks: Vec<Task> = places.iter().zip(self.num_saves..).map(task).collect();
        self.num_saves += tasks.len() as u64;
        let thread = std::thread::Builder::new().name("checkpoint".to_owned());
        let (tell, first) = channel();
        let spawned = thread.spawn(move || {
            let run = |task: &Task| {
                let outcome = task.run(&staged);
                // Nobody may care.
                let _ = tell.send(());
                (task.place.clone(), outcome)
            };
            let outcomes = tasks.iter().map(run).collect();
            (staged.bytes, outcomes)
        });
        self.first = Some(first);
        self.under_way = Some(spawned.map_err(TrainError::io(Path::new("checkpoint thread")))?);
        if places.iter().any(|place| !place.is_async) {
            self.finish();
        }
        Ok(Saved {
            pause: began.elapsed(),
            staging_bytes,
        })
    }

    /// Waits until the first rank has tidied up after the last save. It would take files of another one of the
    /// same step, which are in the same folder, for what an interrupted save has left.
    fn wait_for_tidying(&self) -> Result<()> {
        let Some(meeting) = &self.meeting else {
            return Ok(());
        };
        let key = format!("tidied up before {}", self.num_saves);
        if self.rank == 0 {
            return Ok(meeting.set(&key, b"yes")?);
        }
        told(meeting, &key, &self.is_over)?;
        Ok(())
    }

    /// Waits until the save under way is in the first of its places, or has failed there.
    pub fn wait_for_first(&mut self) {
        if let Some(first) = self.first.take() {
            // An error is the end of a thread that panicked, which is told when it is joined.
            let _ = first.recv();
        }
    }

    /// Waits for the save under way. A failure is told here.
    pub fn finish(&mut self) {
        let Some(thread) = self.under_way.take() else {
            return;
        };
        let Ok((staging, outcomes)) = thread.join() else {
            tracing::error!("not saved: the thread panicked");
            self.lost = self.last;
            return;
        };
        self.staging = staging;
        for (place, outcome) in outcomes {
            let Err(error) = outcome else { continue };
            tracing::error!("not saved: {error}");
            if place.is_lasting {
                self.lost = self.last;
            }
        }
    }

    /// Whether the state of a step could not be saved in a place that lasts.
    pub fn has_lost(&self, step: u64) -> bool {
        self.lost == Some(step)
    }
}

impl Drop for Saver {
    /// After an error elsewhere, other ranks may never tell what they have written.
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.finish();
    }
}

/// What another rank tells under a key, however long it takes, unless the job is over meanwhile.
fn told(meeting: &Meeting, key: &str, is_over: &AtomicBool) -> Result<Vec<u8>, TorchError> {
    let began = Instant::now();
    loop {
        match meeting.get_within(key, GLANCE) {
            Err(_) if began.elapsed() < PATIENCE && !is_over.load(Ordering::Relaxed) => {}
            told => return told,
        }
    }
}

/// A copy of what this rank writes.
struct Staged {
    parts: Vec<Part>,
    places: Vec<Range<usize>>,
    bytes: Vec<u8>,
}

impl Staged {
    fn new(mut memory: Vec<u8>) -> Staged {
        memory.clear();
        Staged {
            parts: Vec::new(),
            places: Vec::new(),
            bytes: memory,
        }
    }

    /// Room for the bytes of one more part.
    fn append(&mut self, part: &Part) -> &mut [u8] {
        let start = self.bytes.len();
        let end = start + part.num_bytes().unwrap_or(0) as usize;
        self.bytes.resize(end, 0);
        self.parts.push(part.clone());
        self.places.push(start..end);
        &mut self.bytes[start..]
    }
}

impl Elements for Staged {
    fn copy(&self, index: usize, start: usize, into: &mut [u8]) -> io::Result<()> {
        let place = &self.bytes[self.places[index].clone()];
        into.copy_from_slice(&place[start..start + into.len()]);
        Ok(())
    }
}

/// One save in one place, as the thread does it.
struct Task {
    place: Destination,
    meeting: Option<Meeting>,
    rank: usize,
    num_ranks: usize,
    number: u64,
    is_over: Arc<AtomicBool>,
    state: TrainState,
}

/// What a rank tells the first one.
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
        self.tell(&report)?;
        let own = written?;
        if self.rank > 0 {
            return Ok(());
        }
        let mut shards = vec![own];
        for rank in 1..self.num_ranks {
            shards.push(self.hear(rank)?);
        }
        let store = &*self.place.store;
        let num_bytes: u64 = shards.iter().map(|shard| shard.entry.num_bytes).sum();
        let folder = commit(store, self.state.clone(), shards)?;
        let seconds = began.elapsed().as_secs_f64();
        tracing::info!(
            "saved {}: {} in {seconds:.2} s",
            store.describe(&folder),
            readable_bytes(num_bytes)
        );
        if let Err(error) = retain(store, self.state.step, self.place.keep) {
            tracing::warn!("older checkpoints are still there: {error}");
        }
        Ok(())
    }

    fn write(&self, staged: &Staged) -> Result<Shard, CheckpointError> {
        // Of another name than any attempt before, so that those stay whole until this one counts.
        let attempt = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |time| time.as_nanos());
        let file = format!("rank{:05}-{attempt:x}.safetensors", self.rank);
        let folder = step_folder(self.state.step);
        write_shard(&*self.place.store, &folder, &file, &staged.parts, staged)
    }

    fn key(&self, rank: usize) -> String {
        format!("{}/{rank}", self.number)
    }

    fn tell(&self, report: &Report) -> Result<(), CheckpointError> {
        let Some(meeting) = self.meeting.as_ref().filter(|_| self.rank > 0) else {
            return Ok(());
        };
        let text = serde_json::to_vec(report).map_err(|e| self.failed(self.rank, e))?;
        let told = meeting.set(&self.key(self.rank), &text);
        told.map_err(|e| self.failed(self.rank, e))
    }

    fn hear(&self, rank: usize) -> Result<Shard, CheckpointError> {
        let Some(meeting) = &self.meeting else {
            return Err(self.failed(rank, "there is no way to hear of it"));
        };
        let text = told(meeting, &self.key(rank), &self.is_over);
        let text = text.map_err(|e| self.failed(rank, e))?;
        // The store is in memory, and these are long.
        meeting
            .set(&self.key(rank), b"")
            .map_err(|e| self.failed(rank, e))?;
        match serde_json::from_slice(&text).map_err(|e| self.failed(rank, e))? {
            Report::Written(shard) => Ok(shard),
            Report::Failed(reason) => Err(self.failed(rank, reason)),
        }
    }

    fn failed(&self, rank: usize, reason: impl ToString) -> CheckpointError {
        CheckpointError::Rank {
            path: self.place.store.describe(&step_folder(self.state.step)),
            rank,
            reason: reason.to_string(),
        }
    }
}

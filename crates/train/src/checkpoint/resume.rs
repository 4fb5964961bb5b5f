//! Choosing the checkpoint to resume from, in storage or in peer memory, the same on all ranks.
//!
//! Rank 0 searches and broadcasts the result. For a checkpoint in peer memory it broadcasts the whole
//! manifest: a replica server that was unreachable for a while may have another checkpoint of the same
//! step, and all ranks must load by the same manifest.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use trainyard_checkpoint::{Checkpoint, Store, latest_below, latest_complete_below, step_dir};
use trainyard_peer_checkpoint::{Tier, select_resume_point};
use trainyard_torch::World;

use super::load::broadcast_from_rank0;
use crate::error::{Result, TrainError};

/// Where a job resumes from.
#[derive(Debug)]
pub enum ResumeSource {
    /// There is no checkpoint.
    None,
    /// A step in the checkpoint storage.
    Storage(u64),
    /// A step in the memory of peer nodes.
    PeerMemory(u64, Checkpoint),
}

/// Which checkpoints are looked at: those before a step. Newer ones have been found to be damaged.
#[derive(Clone, Copy, Debug)]
pub struct SearchRange {
    /// The end in storage.
    pub storage: u64,
    /// The end in peer memory.
    pub memory: u64,
}

impl SearchRange {
    /// Whether nothing is left out.
    pub fn is_whole(&self) -> bool {
        self.storage == u64::MAX && self.memory == u64::MAX
    }
}

impl Default for SearchRange {
    fn default() -> Self {
        SearchRange {
            storage: u64::MAX,
            memory: u64::MAX,
        }
    }
}

/// The result that rank 0 broadcasts.
#[derive(Serialize, Deserialize)]
enum Found {
    None,
    Storage(u64),
    PeerMemory { step: u64, manifest: String },
    Failed(String),
}

/// The latest checkpoint of storage and peer memory, either of which the job may lack. This is a
/// collective call.
pub fn find_resume_source(
    storage: Option<&dyn Store>,
    memory: Option<&Arc<dyn Store>>,
    range: SearchRange,
    world: &World,
) -> Result<ResumeSource> {
    if storage.is_none() && memory.is_none() {
        return Ok(ResumeSource::None);
    }
    let failed = |reason: &dyn std::fmt::Display| TrainError::ResumeSource(reason.to_string());
    let own = match world.rank() {
        0 => {
            search(storage, memory, range).unwrap_or_else(|error| Found::Failed(error.to_string()))
        }
        _ => Found::None,
    };
    let own = serde_json::to_vec(&own).map_err(|e| failed(&e))?;
    let found = broadcast_from_rank0(&own, world)?;
    Ok(
        match serde_json::from_slice(&found).map_err(|e| failed(&e))? {
            Found::None => ResumeSource::None,
            Found::Storage(step) => ResumeSource::Storage(step),
            Found::PeerMemory { step, manifest } => match memory {
                Some(memory) => {
                    let (memory, folder) = (Arc::clone(memory), step_dir(step));
                    let manifest = manifest.as_bytes();
                    let opened = Checkpoint::from_manifest_bytes(memory, &folder, manifest)?;
                    ResumeSource::PeerMemory(step, opened)
                }
                None => {
                    let reason = format!("rank {} has no peer checkpoint store", world.rank());
                    return Err(failed(&reason));
                }
            },
            // Every rank returns the error of rank 0, so that none waits for it.
            Found::Failed(reason) => return Err(failed(&reason)),
        },
    )
}

/// Searches storage and peer memory from this rank.
fn search(
    storage: Option<&dyn Store>,
    memory: Option<&Arc<dyn Store>>,
    range: SearchRange,
) -> Result<Found> {
    let in_memory = memory.and_then(|memory| {
        let found = latest_complete_below(memory, range.memory);
        found.unwrap_or_else(|error| {
            tracing::warn!("cannot list checkpoints in peer memory: {error}");
            None
        })
    });
    let step_in_memory = in_memory.as_ref().and_then(|c| c.state()).map(|s| s.step);
    let latest_stored = |store| latest_below(store, range.storage);
    let step_in_storage = match storage.map(latest_stored).transpose() {
        Ok(step) => step.flatten(),
        // The checkpoint in peer memory is complete, so storage is not needed.
        Err(error) if in_memory.is_some() => {
            tracing::warn!("cannot list checkpoints in storage: {error}");
            None
        }
        Err(error) => return Err(error.into()),
    };
    let Some(point) = select_resume_point(step_in_storage, step_in_memory) else {
        tracing::info!("no checkpoint to resume from: training starts at step 1");
        return Ok(Found::None);
    };
    if memory.is_some() {
        tracing::info!("{point}");
    }
    let step = point.step;
    Ok(match (point.tier, in_memory) {
        (Tier::Memory, Some(checkpoint)) => Found::PeerMemory {
            step,
            manifest: String::from_utf8_lossy(&checkpoint.manifest().encode()?).into_owned(),
        },
        _ => Found::Storage(step),
    })
}

//! Finding the newest state, in storage or in peers' memory, the same on all ranks.
//!
//! The first rank looks and tells. Of a state in memory it tells the whole manifest: holders that were
//! away for a while may have another of the same step, and all ranks must load by one.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use trainyard_checkpoint::{Checkpoint, Store, latest, latest_whole, step_folder};
use trainyard_copies::{Place, newest as choose};
use trainyard_torch::World;

use super::load::told_by_the_first;
use crate::error::{Result, TrainError};

/// The newest state.
#[derive(Debug)]
pub enum Newest {
    /// Nobody has any.
    Nothing,
    /// In this folder of the storage.
    Storage(String),
    /// In peers' memory.
    Memory(Checkpoint),
}

/// What the first rank tells.
#[derive(Serialize, Deserialize)]
enum Told {
    Nothing,
    Storage(String),
    Memory { folder: String, manifest: String },
    Failed(String),
}

/// The newest state of two places, either of which the job may lack. All ranks must ask.
pub fn newest(
    storage: Option<&dyn Store>,
    memory: Option<&Arc<dyn Store>>,
    world: &World,
) -> Result<Newest> {
    if storage.is_none() && memory.is_none() {
        return Ok(Newest::Nothing);
    }
    let failed = |reason: &dyn std::fmt::Display| TrainError::Newest(reason.to_string());
    let own = match world.rank() {
        0 => look(storage, memory).unwrap_or_else(|error| Told::Failed(error.to_string())),
        _ => Told::Nothing,
    };
    let own = serde_json::to_vec(&own).map_err(|e| failed(&e))?;
    let told = told_by_the_first(&own, world)?;
    Ok(
        match serde_json::from_slice(&told).map_err(|e| failed(&e))? {
            Told::Nothing => Newest::Nothing,
            Told::Storage(folder) => Newest::Storage(folder),
            Told::Memory { folder, manifest } => match memory {
                Some(memory) => {
                    let memory = Arc::clone(memory);
                    Newest::Memory(Checkpoint::with_text(memory, &folder, manifest.as_bytes())?)
                }
                None => return Err(failed(&"this rank has no way to its peers' memory")),
            },
            // Everybody fails here, and nobody waits for the first rank.
            Told::Failed(reason) => return Err(failed(&reason)),
        },
    )
}

/// What there is, as this rank sees it.
fn look(storage: Option<&dyn Store>, memory: Option<&Arc<dyn Store>>) -> Result<Told> {
    let in_memory = memory.and_then(|memory| {
        let found = latest_whole(memory);
        found.unwrap_or_else(|error| {
            tracing::warn!("nothing from peers' memory: {error}");
            None
        })
    });
    let step_in_memory = in_memory.as_ref().and_then(|c| c.state()).map(|s| s.step);
    let stored = match storage.map(latest).transpose() {
        Ok(folder) => folder.flatten(),
        // What is in memory is as good, and better than nothing.
        Err(error) if in_memory.is_some() => {
            tracing::warn!("nothing from storage: {error}");
            None
        }
        Err(error) => return Err(error.into()),
    };
    let step_of = |folder: &String| folder.strip_prefix("step-")?.parse().ok();
    let Some(choice) = choose(stored.as_ref().and_then(step_of), step_in_memory) else {
        tracing::info!("there is no state to resume from: training begins with step 1");
        return Ok(Told::Nothing);
    };
    if memory.is_some() {
        tracing::info!("{choice}");
    }
    let folder = step_folder(choice.step);
    Ok(match (choice.place, in_memory) {
        (Place::Memory, Some(checkpoint)) => Told::Memory {
            folder,
            manifest: String::from_utf8_lossy(&checkpoint.manifest().encode()?).into_owned(),
        },
        _ => Told::Storage(folder),
    })
}

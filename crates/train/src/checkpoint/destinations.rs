//! Where a job saves its checkpoints: storage and peer memory.

use std::sync::Arc;

use trainyard_checkpoint::store::{self, Subfolder};
use trainyard_checkpoint::{CheckpointError, Owner, Ownership, Store};
use trainyard_config::{AsyncMode, Config};
use trainyard_torch::World;

use super::load::broadcast_from_rank0;
use super::{Destination, peers};
use crate::error::{Result, TrainError};
use crate::fingerprint::fingerprint;

/// The checkpoint storage, if `checkpoint.enable` is true. Rank 0, which commits and deletes checkpoints, claims it.
pub(crate) fn storage(config: &Config, world: &World) -> Result<Option<Destination>> {
    let section = &config.checkpoint;
    if !section.enable {
        return Ok(None);
    }
    let store = stored_checkpoints(config)?;
    let owner = claim_for_all(&*store, section.memory_interval > 0, world)?;
    Ok(Some(Destination {
        store,
        keep: section.keep_latest_k,
        is_async: section.async_mode == AsyncMode::Async,
        is_durable: true,
        owner,
    }))
}

/// Rank 0 claims the storage; every rank returns an error if it may not, so that none waits for it. This is a collective
/// call.
fn claim_for_all(
    store: &dyn Store,
    has_memory: bool,
    world: &World,
) -> Result<Option<Arc<Ownership>>> {
    let claimed = match world.rank() {
        0 => claim(store, has_memory),
        _ => Ok(None),
    };
    let refusal = claimed.as_ref().err().map(|error| {
        let is_final = u8::from(error.is_rejection());
        let text = error.to_string();
        [&[is_final], text.as_bytes()].concat()
    });
    let refusal = broadcast_from_rank0(&refusal.unwrap_or_default(), world)?;
    match (claimed, refusal.split_first()) {
        (Ok(_), Some((is_final, reason))) => Err(TrainError::StorageRefused {
            reason: String::from_utf8_lossy(reason).into_owned(),
            is_final: *is_final != 0,
        }),
        (claimed, _) => claimed,
    }
}

/// Claims the storage. If it cannot be used at all, a job that can continue from peer memory goes on without it.
fn claim(store: &dyn Store, has_memory: bool) -> Result<Option<Arc<Ownership>>> {
    match this_owner().and_then(|owner| Ownership::claim(store, owner)) {
        Ok(owner) => Ok(Some(Arc::new(owner))),
        Err(error) if has_memory && !matches!(error, CheckpointError::Owned { .. }) => {
            tracing::warn!("the checkpoint storage cannot be used: {error}");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// This process as the owner of a checkpoint folder: the run and the epoch that the launcher names.
fn this_owner() -> trainyard_checkpoint::Result<Owner> {
    let run = std::env::var("TORCHELASTIC_RUN_ID").unwrap_or("none".into());
    let number = |name| std::env::var(name).ok()?.parse().ok();
    let epoch = number("TRAINYARD_EPOCH").or(number("TORCHELASTIC_RESTART_COUNT"));
    Owner::this_process(&run, epoch.unwrap_or(0))
}

/// Peer memory, if `checkpoint.memory_interval` is set. The older checkpoint is deleted when the newer one
/// is complete, so there are never more than two.
pub(crate) fn memory(config: &Config, world: &World) -> Result<Option<Destination>> {
    if config.checkpoint.memory_interval == 0 {
        return Ok(None);
    }
    let Some(peers) = peers(world)? else {
        tracing::warn!(
            "checkpoint.memory_interval has no effect: there are no replica servers; start the job with \
             `trainyard run`"
        );
        return Ok(None);
    };
    Ok(Some(Destination {
        // A replica server may serve several jobs.
        store: Arc::new(Subfolder::new(Arc::new(peers), fingerprint(config)?)),
        keep: 1,
        is_async: true,
        is_durable: false,
        owner: None,
    }))
}

/// The storage of the job's checkpoints.
pub(super) fn stored_checkpoints(config: &Config) -> Result<Arc<dyn Store>> {
    let store = store::open_under(&config.job.dump_folder, &config.checkpoint.folder)?;
    Ok(store)
}

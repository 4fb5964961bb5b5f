//! Committing a checkpoint: one rank writes the manifest atomically after all ranks wrote their shards.

use std::collections::BTreeMap;

use crate::manifest::{MANIFEST, Manifest, TensorEntry};
use crate::shard::Shard;
use crate::step_dir::{VERSION_1_STATE, step_dir, steps_below};
use crate::{CheckpointError, Result, Store, TrainState};

/// Commits the shards of all ranks as the checkpoint of `state.step`. When this returns, the checkpoint is
/// durable.
///
/// Replaces an existing checkpoint of the same step and deletes the files that only the old one used.
pub fn commit(store: &dyn Store, state: TrainState, shards: Vec<Shard>) -> Result<String> {
    let dir = step_dir(state.step);
    let described = store.describe(&dir);
    let mut manifest = Manifest {
        state: Some(state),
        tensors: BTreeMap::new(),
        files: BTreeMap::new(),
    };
    for shard in shards {
        manifest
            .files
            .insert(shard.file.clone(), shard.entry.clone());
        for (item, chunk) in shard.chunks() {
            let tensor = manifest.tensors.entry(item.name.clone());
            let tensor = tensor.or_insert_with(|| TensorEntry {
                dtype: item.dtype,
                shape: item.shape.clone(),
                chunks: Vec::new(),
            });
            if tensor.dtype != item.dtype || tensor.shape != item.shape {
                let reason = "ranks disagree on its type or shape";
                return Err(CheckpointError::tensor(&described, &item.name, reason));
            }
            tensor.chunks.push(chunk);
        }
    }
    manifest.check(&described)?;
    store.put(&format!("{dir}/{MANIFEST}"), &manifest.encode()?)?;
    // The checkpoint is committed; stale files beside it only take space.
    if let Err(error) = remove_stale_files(store, &dir, &manifest) {
        tracing::warn!("the checkpoint is saved, but stale files could not be deleted: {error}");
    }
    Ok(dir)
}

/// Fails unless every file that ranks report to have written to the checkpoint of `step` is there, whole.
pub fn check_files(store: &dyn Store, step: u64, shards: &[Shard]) -> Result<()> {
    for shard in shards {
        let path = format!("{}/{}", step_dir(step), shard.file);
        let (found, expected) = (store.size(&path)?, shard.entry.num_bytes);
        if found != Some(expected) {
            let found = found.map_or("is missing".into(), |bytes| format!("has {bytes} bytes"));
            return Err(CheckpointError::Corrupted {
                path: store.describe(&path),
                reason: format!("it {found}, and {expected} bytes were written"),
            });
        }
    }
    Ok(())
}

/// Deletes the files of earlier attempts, which the manifest does not name.
fn remove_stale_files(store: &dyn Store, dir: &str, manifest: &Manifest) -> Result<()> {
    for name in store.list(dir)? {
        if name != MANIFEST && !manifest.files.contains_key(&name) {
            store.remove(&format!("{dir}/{name}"))?;
        }
    }
    Ok(())
}

/// Applies the retention policy after step `saved` was saved: keeps the newest `keep` checkpoints up to that
/// step (0 keeps all) and deletes older ones, and the remainders of interrupted saves of older steps. A checkpoint
/// whose state is not `is_own`, of another job that used the storage before, is not deleted, and neither is one whose
/// manifest cannot be read; without `is_own` all are.
pub fn retain(
    store: &dyn Store,
    saved: u64,
    keep: usize,
    is_own: Option<&dyn Fn(&TrainState) -> bool>,
) -> Result<()> {
    let (complete, partial) = steps_below(store, saved)?;
    let is_own = |step: &u64| {
        is_own.is_none_or(|is_own| state_of(store, *step).is_ok_and(|state| is_own(&state)))
    };
    let outdated = outdated(complete, keep).into_iter().filter(is_own);
    for step in outdated.chain(partial) {
        let dir = step_dir(step);
        // The manifest goes first: an interrupted deletion must not leave a directory that looks complete.
        for marker in [MANIFEST, VERSION_1_STATE] {
            store.remove(&format!("{dir}/{marker}"))?;
        }
        store.remove_dir(&dir)?;
    }
    Ok(())
}

/// The state in the manifest of a step.
fn state_of(store: &dyn Store, step: u64) -> Result<TrainState> {
    let path = format!("{}/{MANIFEST}", step_dir(step));
    let size = store.size(&path)?.unwrap_or(0);
    let manifest = Manifest::decode(&store.describe(&path), &store.read(&path, 0..size)?)?;
    manifest.state.ok_or_else(|| CheckpointError::Corrupted {
        path: store.describe(&path),
        reason: "it has no training state".to_owned(),
    })
}

/// The steps to delete: of those before the step just saved, all but the newest `keep - 1`.
fn outdated(mut steps: Vec<u64>, keep: usize) -> Vec<u64> {
    if keep == 0 {
        return Vec::new();
    }
    steps.sort_unstable_by(|a, b| b.cmp(a));
    steps.into_iter().skip(keep - 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_checkpoints_are_deleted() {
        assert_eq!(outdated(vec![30, 10, 20], 2), [20, 10]);
        assert_eq!(outdated(vec![30, 10, 20], 0), [0u64; 0]);
        assert_eq!(outdated(vec![10], 5), [0u64; 0]);
    }
}

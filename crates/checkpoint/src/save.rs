//! Making a checkpoint of what ranks have written: one manifest, put in its place in one step.

use std::collections::BTreeMap;

use crate::folder::{step_folder, steps_below};
use crate::manifest::{MANIFEST, Manifest, TensorEntry};
use crate::shard::Shard;
use crate::version_1::STATE_FILE;
use crate::{CheckpointError, Result, Store, TrainState};

/// Makes the shards of all ranks the checkpoint of `state.step`. When this returns it is there for sure.
///
/// A checkpoint of the same step is replaced; files of it that are needed no more go afterwards.
pub fn commit(store: &dyn Store, state: TrainState, shards: Vec<Shard>) -> Result<String> {
    let folder = step_folder(state.step);
    let described = store.describe(&folder);
    let mut manifest = Manifest {
        state: Some(state),
        tensors: BTreeMap::new(),
        files: BTreeMap::new(),
    };
    for shard in shards {
        manifest
            .files
            .insert(shard.file.clone(), shard.entry.clone());
        for (part, piece) in shard.pieces() {
            let tensor = manifest.tensors.entry(part.name.clone());
            let tensor = tensor.or_insert_with(|| TensorEntry {
                dtype: part.dtype,
                shape: part.shape.clone(),
                pieces: Vec::new(),
            });
            if tensor.dtype != part.dtype || tensor.shape != part.shape {
                let reason = "ranks disagree on its type or shape";
                return Err(CheckpointError::tensor(&described, &part.name, reason));
            }
            tensor.pieces.push(piece);
        }
    }
    manifest.check(&described)?;
    store.put(&format!("{folder}/{MANIFEST}"), &manifest.encode()?)?;
    // It is saved; what else lies there is only in the way.
    if let Err(error) = remove_strangers(store, &folder, &manifest) {
        tracing::warn!("saved, but not tidied up: {error}");
    }
    Ok(folder)
}

/// Deletes what earlier attempts left in the folder.
fn remove_strangers(store: &dyn Store, folder: &str, manifest: &Manifest) -> Result<()> {
    for name in store.list(folder)? {
        if name != MANIFEST && !manifest.files.contains_key(&name) {
            store.remove(&format!("{folder}/{name}"))?;
        }
    }
    Ok(())
}

/// Deletes checkpoints older than `saved` until `keep` are left with it, and what interrupted saves
/// left of older steps; 0 keeps all checkpoints.
pub fn retain(store: &dyn Store, saved: u64, keep: usize) -> Result<()> {
    let (complete, partial) = steps_below(store, saved)?;
    for step in outdated(complete, keep).into_iter().chain(partial) {
        let folder = step_folder(step);
        // Without its manifest it is no checkpoint any more, however far the rest gets.
        for sign in [MANIFEST, STATE_FILE] {
            store.remove(&format!("{folder}/{sign}"))?;
        }
        store.remove_folder(&folder)?;
    }
    Ok(())
}

/// Of steps before the one just saved, all but the newest `keep - 1`.
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
    fn oldest_go_first() {
        assert_eq!(outdated(vec![30, 10, 20], 2), [20, 10]);
        assert_eq!(outdated(vec![30, 10, 20], 0), [0u64; 0]);
        assert_eq!(outdated(vec![10], 5), [0u64; 0]);
    }
}

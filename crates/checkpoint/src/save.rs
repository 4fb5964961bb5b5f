//! Writing a checkpoint: beside its place, durably, and then with one rename.

use std::fs;
use std::path::{Path, PathBuf};

use tch::Tensor;
use trainyard_nn::{Module, Parameter, weights};

use crate::durable;
use crate::folder::{Leftover, leftover_path, step_path};
use crate::retain::{condemn, remove, retain};
use crate::state::StateFile;
use crate::{CheckpointError, FILES, MODEL_FILE, OPTIMIZER_FILE, Result, STATE_FILE, TrainState};

/// Writes the checkpoint of `state.step` into `folder` and returns its path.
///
/// When this returns it is on the disk. Only then are older ones deleted until `keep_latest_k` are
/// left; 0 keeps all. A checkpoint of the same step is replaced.
pub fn save(
    folder: impl AsRef<Path>,
    model: &dyn Module,
    optimizer: &[(String, Tensor)],
    state: &TrainState,
    keep_latest_k: usize,
) -> Result<PathBuf> {
    let folder = folder.as_ref();
    fs::create_dir_all(folder).map_err(CheckpointError::io(folder))?;
    let partial = leftover_path(folder, state.step, Leftover::Partial);
    remove(&partial)?;
    fs::create_dir(&partial).map_err(CheckpointError::io(&partial))?;
    write(&partial, model, optimizer, state)?;

    let path = step_path(folder, state.step);
    let replaced = condemn(folder, state.step)?;
    durable::rename(&partial, &path)?;
    remove(&replaced)?;
    retain(folder, state.step, keep_latest_k)?;
    Ok(path)
}

/// Writes all files and returns when they are on the disk.
fn write(
    folder: &Path,
    model: &dyn Module,
    optimizer: &[(String, Tensor)],
    state: &TrainState,
) -> Result<()> {
    weights::save(folder.join(MODEL_FILE), model)?;
    weights::save(folder.join(OPTIMIZER_FILE), &named(optimizer)?)?;
    StateFile::new(state, optimizer)?.write(&folder.join(STATE_FILE))?;
    for file in FILES {
        durable::sync(&folder.join(file))?;
    }
    durable::sync(folder)
}

/// Plain tensors as a module, so that they are written and read as weights are.
pub(crate) fn named(tensors: &[(String, Tensor)]) -> Result<Vec<Parameter>> {
    tensors
        .iter()
        .map(|(name, tensor)| {
            Ok(Parameter::from_tensor(
                name.as_str(),
                tensor.shallow_clone(),
            )?)
        })
        .collect()
}

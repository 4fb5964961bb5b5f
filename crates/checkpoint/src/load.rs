//! Reading a checkpoint: the same names, shapes and kinds, or an error that says what differs.

use std::path::{Path, PathBuf};

use tch::Tensor;
use trainyard_nn::{Module, weights};

use crate::save::named;
use crate::state::{StateFile, TensorEntry};
use crate::{MODEL_FILE, OPTIMIZER_FILE, Result, STATE_FILE, TrainState};

/// A checkpoint on disk whose state has been read; its tensors are read when asked for.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    state: TrainState,
    optimizer: Vec<TensorEntry>,
}

impl Checkpoint {
    /// Opens the folder of one step, as [`crate::latest`] names it.
    pub fn open(path: impl Into<PathBuf>) -> Result<Checkpoint> {
        let path = path.into();
        let file = StateFile::read(&path.join(STATE_FILE))?;
        Ok(Checkpoint {
            path,
            state: file.state,
            optimizer: file.optimizer,
        })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the job stood.
    pub fn state(&self) -> &TrainState {
        &self.state
    }

    /// Fills every parameter of `model`; nothing is changed if anything differs.
    pub fn load_model(&self, model: &dyn Module) -> Result<()> {
        Ok(weights::load(self.path.join(MODEL_FILE), model)?)
    }

    /// The optimiser's tensors in main memory, in the order they were saved.
    pub fn load_optimizer(&self) -> Result<Vec<(String, Tensor)>> {
        let tensors = self
            .optimizer
            .iter()
            .map(|entry| Ok((entry.name.clone(), entry.empty()?)))
            .collect::<Result<Vec<_>>>()?;
        weights::load(self.path.join(OPTIMIZER_FILE), &named(&tensors)?)?;
        Ok(tensors)
    }
}

//! Everything of a job's state that is no tensor.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::{CheckpointError, Result};

/// The format of the state file.
const VERSION: u64 = 1;

/// Where a job stands, beside its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    /// Optimiser steps taken.
    pub step: u64,
    /// Samples seen over all ranks.
    pub samples_seen: u64,
    /// The seed of weights and data.
    pub seed: u64,
    /// How many ranks there were.
    pub world_size: usize,
    /// The config, as TOML.
    pub config: String,
    /// The learning-rate schedule, as the trainer describes it.
    pub schedule: serde_json::Value,
}

/// The state file: its version, the state, and what the optimiser's file must hold.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StateFile {
    version: u64,
    #[serde(flatten)]
    pub(crate) state: TrainState,
    pub(crate) optimizer: Vec<TensorEntry>,
}

/// A tensor without its elements.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct TensorEntry {
    pub(crate) name: String,
    shape: Vec<i64>,
    dtype: Dtype,
}

/// Element kinds, by the names safetensors gives them.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
enum Dtype {
    F64,
    F32,
    F16,
    BF16,
    I64,
}

impl StateFile {
    pub(crate) fn new(state: &TrainState, optimizer: &[(String, Tensor)]) -> Result<StateFile> {
        let entries = optimizer
            .iter()
            .map(|(name, tensor)| TensorEntry::of(name, tensor));
        Ok(StateFile {
            version: VERSION,
            state: state.clone(),
            optimizer: entries.collect::<Result<_>>()?,
        })
    }

    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(malformed(path))?;
        fs::write(path, text).map_err(CheckpointError::io(path))
    }

    pub(crate) fn read(path: &Path) -> Result<StateFile> {
        /// A later version may have other fields, so this one is read by itself first.
        #[derive(Deserialize)]
        struct Versioned {
            version: u64,
        }
        let text = fs::read(path).map_err(CheckpointError::io(path))?;
        let Versioned { version } = serde_json::from_slice(&text).map_err(malformed(path))?;
        if version != VERSION {
            return Err(CheckpointError::Version {
                path: path.to_owned(),
                found: version,
                known: VERSION,
            });
        }
        serde_json::from_slice(&text).map_err(malformed(path))
    }
}

impl TensorEntry {
    fn of(name: &str, tensor: &Tensor) -> Result<TensorEntry> {
        let kind = tensor.f_kind()?;
        let name = name.to_owned();
        match Dtype::of(kind) {
            Some(dtype) => Ok(TensorEntry {
                name,
                shape: tensor.size(),
                dtype,
            }),
            None => Err(CheckpointError::Kind { name, kind }),
        }
    }

    /// A tensor of this shape and kind in main memory, its elements not set.
    pub(crate) fn empty(&self) -> Result<Tensor> {
        let kind = self.dtype.kind();
        Ok(Tensor::f_empty(&self.shape[..], (kind, Device::Cpu))?)
    }
}

impl Dtype {
    const ALL: [Dtype; 5] = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::I64];

    fn kind(self) -> Kind {
        match self {
            Dtype::F64 => Kind::Double,
            Dtype::F32 => Kind::Float,
            Dtype::F16 => Kind::Half,
            Dtype::BF16 => Kind::BFloat16,
            Dtype::I64 => Kind::Int64,
        }
    }

    fn of(kind: Kind) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| dtype.kind() == kind)
    }
}

fn malformed(path: &Path) -> impl FnOnce(serde_json::Error) -> CheckpointError + '_ {
    move |source| CheckpointError::Format {
        path: path.to_owned(),
        source,
    }
}

//! `[checkpoint]`: saving and resuming.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::at_least_one;
use crate::ConfigError;

/// Whether training continues while a checkpoint is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum AsyncMode {
    /// Training waits.
    #[default]
    #[serde(rename = "disabled")]
    Disabled,
    /// Training continues as soon as the state is copied to staging memory.
    #[serde(rename = "async")]
    Async,
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSection {
    /// Whether checkpoints are saved to the folder and resumed from it.
    pub enable: bool,
    /// Folder for checkpoints, under `job.dump_folder`, or `s3://bucket/prefix`.
    pub folder: PathBuf,
    /// Steps between two checkpoints.
    pub interval: u64,
    /// Whether training continues while a checkpoint is written.
    pub async_mode: AsyncMode,
    /// Number of checkpoints to keep; 0 keeps all.
    pub keep_latest_k: usize,
    /// A checkpoint to start from if the folder has none: a path, or `s3://bucket/prefix`.
    pub initial_load_path: Option<PathBuf>,
    /// Whether to resume from the newest checkpoint, in the folder or in the memory of peers.
    pub resume: bool,
    /// Steps between two in-memory checkpoints on peers, with or without `enable`; 0 for none.
    pub memory_interval: u64,
}

impl Default for CheckpointSection {
    fn default() -> Self {
        CheckpointSection {
            enable: false,
            folder: "checkpoint".into(),
            interval: 500,
            async_mode: AsyncMode::Disabled,
            keep_latest_k: 10,
            initial_load_path: None,
            resume: true,
            memory_interval: 0,
        }
    }
}

impl CheckpointSection {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        at_least_one("checkpoint.interval", self.interval)
    }
}

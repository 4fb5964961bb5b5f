//! `[checkpoint]`: saving and resuming.

use std::path::PathBuf;

use documented::DocumentedFields;
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

/// A difference to the job that saved a checkpoint, with which a job resumes only if `checkpoint.allow` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeChange {
    /// Another seed.
    Seed,
    /// Another dataset, path or sequence length.
    Dataset,
    /// Another optimizer.
    Optimizer,
    /// Another global batch size.
    Batch,
    /// Fewer steps than were taken.
    Steps,
}

impl ResumeChange {
    const ALL: [ResumeChange; 5] = [
        ResumeChange::Seed,
        ResumeChange::Dataset,
        ResumeChange::Optimizer,
        ResumeChange::Batch,
        ResumeChange::Steps,
    ];

    /// Its name in `checkpoint.allow`.
    pub fn name(self) -> &'static str {
        match self {
            ResumeChange::Seed => "seed",
            ResumeChange::Dataset => "dataset",
            ResumeChange::Optimizer => "optimizer",
            ResumeChange::Batch => "batch",
            ResumeChange::Steps => "steps",
        }
    }
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
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
    /// Differences to the job that saved a checkpoint which are allowed when it is resumed: `seed`, `dataset`,
    /// `optimizer`, `batch` and `steps`, separated by commas.
    pub allow: String,
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
            allow: String::new(),
        }
    }
}

impl CheckpointSection {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        self.allowed_changes()?;
        at_least_one("checkpoint.interval", self.interval)
    }

    /// The changes that `allow` names.
    pub fn allowed_changes(&self) -> Result<Vec<ResumeChange>, ConfigError> {
        let names = self.allow.split(',').map(str::trim);
        let change = |name: &str| {
            let found = ResumeChange::ALL.into_iter().find(|c| c.name() == name);
            found.ok_or_else(|| {
                let all: Vec<&str> = ResumeChange::ALL
                    .into_iter()
                    .map(ResumeChange::name)
                    .collect();
                ConfigError::contradiction(
                    format!("checkpoint.allow has {name:?}, which is no change that it can allow"),
                    format!("use some of {}, separated by commas", all.join(", ")),
                )
            })
        };
        names.filter(|name| !name.is_empty()).map(change).collect()
    }
}

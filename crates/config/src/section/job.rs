//! `[job]`: where the job writes, and what it is called.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `[job]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JobSection {
    /// Folder under which checkpoints, metrics and traces are written.
    pub dump_folder: PathBuf,
    /// A line for people.
    pub description: String,
    /// The machines, as `trainyard plan --cluster` takes them: for `parallelism = "auto"`.
    pub cluster: Option<String>,
}

impl Default for JobSection {
    fn default() -> Self {
        JobSection {
            dump_folder: "./outputs".into(),
            description: String::new(),
            cluster: None,
        }
    }
}

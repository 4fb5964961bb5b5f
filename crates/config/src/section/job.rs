//! `[job]`: the output directory and the description of the job.

use std::path::PathBuf;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

/// `[job]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct JobSection {
    /// The output directory for checkpoints, metrics and traces.
    pub dump_folder: PathBuf,
    /// A description for people.
    pub description: String,
    /// The cluster, in the format of `trainyard plan --cluster`, for `parallelism = "auto"`.
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

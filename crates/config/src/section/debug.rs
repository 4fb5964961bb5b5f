//! `[debug]`: seed and determinism.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `[debug]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DebugSection {
    /// Initial weights, synthetic data and shuffling depend on it.
    pub seed: u64,
    /// Whether only deterministic kernels may run.
    pub deterministic: bool,
    /// A folder under `job.dump_folder` for logs of every sample that was trained on; none if absent.
    pub sample_log_folder: Option<PathBuf>,
    /// How much routers prefer the first experts, to try what unequal loads cost: by one over an expert's
    /// number to this power. A dry run, which knows no tokens, takes loads from it; 0 is an equal load.
    pub routing_skew: f64,
}

impl Default for DebugSection {
    fn default() -> Self {
        DebugSection {
            seed: 1,
            deterministic: false,
            sample_log_folder: None,
            routing_skew: 0.0,
        }
    }
}

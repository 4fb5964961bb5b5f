//! `[debug]`: seed and determinism.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `[debug]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DebugSection {
    /// The seed of initial weights, synthetic data, shuffling and dropout.
    pub seed: u64,
    /// Whether only deterministic kernels may run.
    pub deterministic: bool,
    /// A directory under `job.dump_folder` in which every rank logs its samples; none if absent.
    pub sample_log_folder: Option<PathBuf>,
    /// The skew of routing towards the first experts, as the exponent of a power law, to measure the cost of unequal
    /// loads. A dry run, which has no tokens, uses it for the loads; 0 is an equal load.
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

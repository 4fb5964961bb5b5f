//! `[debug]`: seed and determinism.

use serde::{Deserialize, Serialize};

/// `[debug]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DebugSection {
    /// Initial weights, synthetic data and shuffling depend on it.
    pub seed: u64,
    /// Whether only deterministic kernels may run.
    pub deterministic: bool,
}

impl Default for DebugSection {
    fn default() -> Self {
        DebugSection {
            seed: 1,
            deterministic: false,
        }
    }
}

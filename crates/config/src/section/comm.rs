//! `[comm]`: process groups and their timeouts.

use serde::{Deserialize, Serialize};

use super::at_least_one;
use crate::ConfigError;

/// What carries collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backend {
    /// TCP between CPUs.
    #[default]
    #[serde(rename = "gloo")]
    Gloo,
    /// NVIDIA GPUs.
    #[serde(rename = "nccl")]
    Nccl,
    /// Nothing: collectives return at once. For dry runs.
    #[serde(rename = "fake")]
    Fake,
}

/// `[comm]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CommSection {
    /// What carries collectives.
    pub backend: Backend,
    /// How long ranks may take to find each other, and to finish the first step.
    pub init_timeout_seconds: u64,
    /// How long a collective may take after that.
    pub train_timeout_seconds: u64,
    /// torchtitan's; without effect, since the last collective of every group is always known.
    pub trace_buf_size: usize,
}

impl Default for CommSection {
    fn default() -> Self {
        CommSection {
            backend: Backend::Gloo,
            init_timeout_seconds: 300,
            train_timeout_seconds: 300,
            trace_buf_size: 20_000,
        }
    }
}

impl CommSection {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        at_least_one("comm.init_timeout_seconds", self.init_timeout_seconds)?;
        at_least_one("comm.train_timeout_seconds", self.train_timeout_seconds)
    }
}

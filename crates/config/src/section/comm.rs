//! `[comm]`: process groups and their timeouts.

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::at_least_one;
use crate::ConfigError;

/// The backend of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backend {
    /// NCCL where the process finds a GPU, Gloo elsewhere.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// Gloo: CPU, over TCP.
    #[serde(rename = "gloo")]
    Gloo,
    /// NCCL: NVIDIA GPUs.
    #[serde(rename = "nccl")]
    Nccl,
    /// A fake backend whose collectives return at once, for dry runs.
    #[serde(rename = "fake")]
    Fake,
}

/// `[comm]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct CommSection {
    /// The backend of collectives.
    pub backend: Backend,
    /// Timeout of initialization and of the first step.
    pub init_timeout_seconds: u64,
    /// Timeout of a collective after that.
    pub train_timeout_seconds: u64,
    /// Whether ranks of one node exchange tensors of the host through memory that they share, not over loopback.
    pub shared_memory: bool,
    /// torchtitan's; no effect, because the last collective of every group is always recorded.
    pub trace_buf_size: usize,
}

impl Default for CommSection {
    fn default() -> Self {
        CommSection {
            backend: Backend::Auto,
            init_timeout_seconds: 300,
            train_timeout_seconds: 300,
            shared_memory: true,
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

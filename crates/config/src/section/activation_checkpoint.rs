//! `[activation_checkpoint]`: recomputing activations instead of keeping them.

use serde::{Deserialize, Serialize};

use crate::ConfigError;

/// What is recomputed in backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ActivationCheckpointMode {
    /// Nothing.
    #[default]
    #[serde(rename = "none")]
    None,
    /// What is cheap to recompute.
    #[serde(rename = "selective")]
    Selective,
    /// Every block.
    #[serde(rename = "full")]
    Full,
}

/// `[activation_checkpoint]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ActivationCheckpointSection {
    /// What is recomputed in backward.
    pub mode: ActivationCheckpointMode,
}

impl ActivationCheckpointSection {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let mode = match self.mode {
            ActivationCheckpointMode::None => return Ok(()),
            ActivationCheckpointMode::Selective => "selective",
            ActivationCheckpointMode::Full => "full",
        };
        Err(ConfigError::not_built(
            format!("activation_checkpoint.mode = \"{mode}\""),
            "activation_checkpoint.mode = \"none\"",
        ))
    }
}

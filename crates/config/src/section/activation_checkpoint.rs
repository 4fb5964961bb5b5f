//! `[activation_checkpoint]`: recomputation of activations in backward.

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use crate::ConfigError;

/// What is recomputed in backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ActivationCheckpointMode {
    /// Nothing.
    #[default]
    #[serde(rename = "none")]
    None,
    /// As `selective_ac_option` says.
    #[serde(rename = "selective")]
    Selective,
    /// Every block.
    #[serde(rename = "full")]
    Full,
    /// As little as `memory_budget_bytes` allows.
    #[serde(rename = "memory_budget")]
    MemoryBudget,
}

/// What selective recomputation recomputes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelectiveOption {
    /// The attention of every block.
    Attention,
    /// Every k-th block.
    Every(usize),
}

/// `[activation_checkpoint]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct ActivationCheckpointSection {
    /// What is recomputed in backward.
    pub mode: ActivationCheckpointMode,
    /// For `selective`: "attention", or a number k for every k-th block.
    pub selective_ac_option: String,
    /// For `memory_budget`: the memory budget of a rank.
    pub memory_budget_bytes: u64,
}

impl Default for ActivationCheckpointSection {
    fn default() -> Self {
        ActivationCheckpointSection {
            mode: ActivationCheckpointMode::None,
            selective_ac_option: "attention".to_owned(),
            memory_budget_bytes: 0,
        }
    }
}

impl ActivationCheckpointSection {
    /// What selective recomputation recomputes.
    pub fn selective(&self) -> Result<SelectiveOption, ConfigError> {
        let option = self.selective_ac_option.as_str();
        match (option, option.parse()) {
            ("attention", _) => Ok(SelectiveOption::Attention),
            (_, Ok(k)) if k > 0 => Ok(SelectiveOption::Every(k)),
            _ => Err(ConfigError::contradiction(
                format!("activation_checkpoint.selective_ac_option = {option:?} is not valid"),
                "use \"attention\", or \"2\" for every second block",
            )),
        }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        self.selective()?;
        let budget = self.memory_budget_bytes;
        match (self.mode == ActivationCheckpointMode::MemoryBudget, budget) {
            (true, 0) => Err(ConfigError::contradiction(
                "activation_checkpoint.mode = \"memory_budget\", but memory_budget_bytes is absent",
                "set activation_checkpoint.memory_budget_bytes",
            )),
            (false, 1..) => Err(ConfigError::contradiction(
                format!(
                    "activation_checkpoint.memory_budget_bytes = {budget} has a meaning only in \
                     mode \"memory_budget\""
                ),
                "use activation_checkpoint.mode = \"memory_budget\"",
            )),
            _ => Ok(()),
        }
    }
}

//! `[lr_scheduler]`: how the learning rate moves.
//!
//! It rises linearly over the warm-up, stays, and falls over the last part of the run.

use serde::{Deserialize, Serialize};

use super::within;
use crate::ConfigError;

/// The shape of the fall.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DecayType {
    /// No fall.
    #[default]
    #[serde(rename = "constant")]
    Constant,
    /// A straight line.
    #[serde(rename = "linear")]
    Linear,
    /// Half a cosine wave.
    #[serde(rename = "cosine")]
    Cosine,
}

/// `[lr_scheduler]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LrSchedulerSection {
    /// Steps over which the rate rises.
    pub warmup_steps: u64,
    /// Part of the run over which it falls; all that follows the warm-up if absent.
    pub decay_ratio: Option<f64>,
    /// The shape of the fall; see [`LrSchedulerSection::decay`] if absent.
    pub decay_type: Option<DecayType>,
    /// What is left at the end, as a part of the peak.
    pub min_lr_factor: f64,
    /// If given, the rate is multiplied by the global batch over this one.
    pub linear_scaling_base_batch: Option<usize>,
}

impl LrSchedulerSection {
    /// The shape of the fall: as given; otherwise linear if `decay_ratio` is given, else constant.
    pub fn decay(&self) -> DecayType {
        match (self.decay_type, self.decay_ratio) {
            (Some(decay), _) => decay,
            (None, Some(_)) => DecayType::Linear,
            (None, None) => DecayType::Constant,
        }
    }

    /// What the peak learning rate is multiplied by for this global batch.
    pub fn batch_scale(&self, global_batch: usize) -> f64 {
        match self.linear_scaling_base_batch {
            Some(base) => global_batch as f64 / base as f64,
            None => 1.0,
        }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        within("lr_scheduler.min_lr_factor", self.min_lr_factor, 0.0, 1.0)?;
        if let Some(ratio) = self.decay_ratio {
            within("lr_scheduler.decay_ratio", ratio, 0.0, 1.0)?;
        }
        if let Some(base) = self.linear_scaling_base_batch {
            super::at_least_one("lr_scheduler.linear_scaling_base_batch", base as u64)?;
        }
        match (self.decay_type, self.decay_ratio) {
            (Some(DecayType::Constant), Some(ratio)) => Err(ConfigError::contradiction(
                format!(
                    "lr_scheduler.decay_type = \"constant\" never falls, but decay_ratio = {ratio}"
                ),
                "remove decay_ratio, or use decay_type = \"linear\" or \"cosine\"",
            )),
            _ => Ok(()),
        }
    }
}

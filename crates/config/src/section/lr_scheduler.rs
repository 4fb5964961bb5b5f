//! `[lr_scheduler]`: the schedule of the learning rate.
//!
//! It rises linearly during warm-up, stays constant, and decays at the end of the run.

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::within;
use crate::ConfigError;

/// The form of the decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DecayType {
    /// No decay.
    #[default]
    #[serde(rename = "constant")]
    Constant,
    /// Linear.
    #[serde(rename = "linear")]
    Linear,
    /// Cosine.
    #[serde(rename = "cosine")]
    Cosine,
}

/// `[lr_scheduler]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct LrSchedulerSection {
    /// A schedule that the program registers, in place of warm-up and decay.
    pub name: Option<String>,
    /// Warm-up steps.
    pub warmup_steps: u64,
    /// The share of the steps over which it decays; all steps after warm-up if absent.
    pub decay_ratio: Option<f64>,
    /// The form of the decay; if absent, linear if `decay_ratio` is given, else constant.
    pub decay_type: Option<DecayType>,
    /// The final learning rate, relative to the peak.
    pub min_lr_factor: f64,
    /// If given, the learning rate is multiplied by the global batch size divided by this value.
    pub linear_scaling_base_batch: Option<usize>,
}

impl LrSchedulerSection {
    /// The form of the decay: as given; otherwise linear if `decay_ratio` is given, else constant.
    pub fn decay(&self) -> DecayType {
        match (self.decay_type, self.decay_ratio) {
            (Some(decay), _) => decay,
            (None, Some(_)) => DecayType::Linear,
            (None, None) => DecayType::Constant,
        }
    }

    /// The factor on the peak learning rate for this global batch size.
    pub fn batch_scale(&self, global_batch: usize) -> f64 {
        match self.linear_scaling_base_batch {
            Some(base) => global_batch as f64 / base as f64,
            None => 1.0,
        }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let alone = LrSchedulerSection {
            name: self.name.clone(),
            linear_scaling_base_batch: self.linear_scaling_base_batch,
            ..LrSchedulerSection::default()
        };
        if self.name.is_some() && *self != alone {
            return Err(ConfigError::contradiction(
                "lr_scheduler.name replaces warm-up and decay, but keys of these are set",
                "remove them, or remove lr_scheduler.name",
            ));
        }
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

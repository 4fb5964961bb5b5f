//! `[validation]`: evaluation on held-out data.

use std::path::PathBuf;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::{Dataset, at_least_one};
use crate::{Choice, ConfigError};

/// `[validation]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct ValidationSection {
    /// Whether the model is evaluated while training.
    pub enable: bool,
    /// Steps between two evaluations.
    pub freq: u64,
    /// Batches of one evaluation.
    pub steps: u64,
    /// The source of held-out samples; as for training if absent.
    pub dataset: Option<Choice<Dataset>>,
    /// The file or directory of that dataset; as for training if absent.
    pub dataset_path: Option<PathBuf>,
}

impl Default for ValidationSection {
    fn default() -> Self {
        ValidationSection {
            enable: false,
            freq: 500,
            steps: 10,
            dataset: None,
            dataset_path: None,
        }
    }
}

impl ValidationSection {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        at_least_one("validation.freq", self.freq)?;
        at_least_one("validation.steps", self.steps)
    }
}

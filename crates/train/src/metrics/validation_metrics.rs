//! The metrics of an evaluation.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The metrics of one evaluation on held-out data.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ValidationMetrics {
    /// Steps taken before the evaluation.
    pub step: u64,
    /// Mean loss over the validation batches.
    pub validation_loss: f64,
}

impl fmt::Display for ValidationMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ValidationMetrics {
            step,
            validation_loss,
        } = self;
        write!(f, "step: {step:2}  validation loss: {validation_loss:8.5}")
    }
}

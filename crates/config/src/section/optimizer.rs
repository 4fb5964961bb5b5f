//! `[optimizer]`: the optimizer and its hyperparameters.

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::within;
use crate::{Choice, ConfigError};

/// The update rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerName {
    /// Adam with decoupled weight decay.
    #[default]
    AdamW,
    /// Stochastic gradient descent with momentum.
    #[serde(rename = "SGD")]
    Sgd,
    /// AdamW with a trust ratio per parameter, for large batches.
    #[serde(rename = "LAMB")]
    Lamb,
    /// SGD with a trust ratio per parameter, for large batches.
    #[serde(rename = "LARS")]
    Lars,
    /// The sign of interpolated momentum: one state per parameter.
    Lion,
    /// Orthogonalized momentum for matrices, AdamW for the rest.
    Muon,
}

/// The implementation of the update. All compute the same result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerImplementation {
    /// One kernel for all parameters.
    #[default]
    #[serde(rename = "fused")]
    Fused,
    /// One kernel per operation, over all parameters.
    #[serde(rename = "foreach")]
    Foreach,
    /// One kernel per operation and parameter.
    #[serde(rename = "for-loop")]
    ForLoop,
}

/// `[optimizer]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerSection {
    /// The update rule.
    pub name: Choice<OptimizerName>,
    /// Peak learning rate.
    pub lr: f64,
    /// Decay of the first moment (AdamW, LAMB, Lion).
    pub beta1: f64,
    /// Decay of the second moment (AdamW, LAMB).
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Momentum (SGD, LARS, Muon).
    pub momentum: f64,
    /// Whether momentum is Nesterov's; by default with Muon, but not with SGD.
    pub nesterov: Option<bool>,
    /// The implementation of the update.
    pub implementation: OptimizerImplementation,
}

impl Default for OptimizerSection {
    fn default() -> Self {
        OptimizerSection {
            name: OptimizerName::AdamW.into(),
            lr: 3e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            momentum: 0.9,
            nesterov: None,
            implementation: OptimizerImplementation::Fused,
        }
    }
}

impl OptimizerSection {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        // With a decay of exactly 1, bias correction would divide by zero.
        let below_one = 1.0 - f64::EPSILON;
        within("optimizer.lr", self.lr, 0.0, f64::INFINITY)?;
        within("optimizer.beta1", self.beta1, 0.0, below_one)?;
        within("optimizer.beta2", self.beta2, 0.0, below_one)?;
        within("optimizer.eps", self.eps, 0.0, f64::INFINITY)?;
        within("optimizer.momentum", self.momentum, 0.0, below_one)?;
        within(
            "optimizer.weight_decay",
            self.weight_decay,
            0.0,
            f64::INFINITY,
        )
    }
}

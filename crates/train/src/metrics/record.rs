//! What is measured in a step.

use serde::{Deserialize, Serialize};

use crate::{ExpertLoad, ExpertTraffic};

/// The metrics of one reported step. Shares are parts of 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Steps taken, this one among them.
    pub step: u64,
    /// Mean loss over all targets of all ranks.
    pub loss: f64,
    /// Norm of the global gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Tokens (or samples) per second and rank.
    pub tps: f64,
    /// Teraflops per second and rank.
    pub tflops: f64,
    /// Share of the device's peak that was used, if the peak is known.
    pub mfu: Option<f64>,
    /// The most memory held at once, in bytes.
    pub memory_bytes: u64,
    /// The same as a share of what the device has.
    pub memory_share: f64,
    /// Seconds per step.
    pub seconds: f64,
    /// Share of that time spent waiting for data.
    pub data_share: f64,
    /// Samples seen over all ranks since the beginning.
    pub samples_seen: u64,
    /// Rows of every expert, layer by layer; none where the model has no experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_loads: Vec<ExpertLoad>,
    /// How long rows were on their way to experts and back; none where those are not on different ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_traffic: Option<ExpertTraffic>,
}

impl StepMetrics {
    /// How many times the mean the largest load of an expert is, in the layer where that is most.
    pub fn imbalance(&self) -> Option<f64> {
        let loads = self.expert_loads.iter().map(ExpertLoad::imbalance);
        loads.max_by(f64::total_cmp)
    }

    /// The share of rows that no expert had room for, in the layer where that is most.
    pub fn dropped_share(&self) -> Option<f64> {
        let shares = self.expert_loads.iter().map(ExpertLoad::dropped_share);
        shares.max_by(f64::total_cmp)
    }

    /// Memory in GiB.
    pub fn memory_gib(&self) -> f64 {
        self.memory_bytes as f64 / (1u64 << 30) as f64
    }
}

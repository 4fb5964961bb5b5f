//! The metrics of a step.

use serde::{Deserialize, Serialize};

use crate::{ExpertLoad, ExpertTraffic};

/// The metrics of one reported step. Shares are fractions of 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Mean loss over all targets of all ranks.
    pub loss: f64,
    /// Norm of the global gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Throughput per rank, in tokens (or samples) per second.
    pub tps: f64,
    /// TFLOP/s per rank.
    pub tflops: f64,
    /// Model FLOPs utilization, if the peak of the device is known.
    pub mfu: Option<f64>,
    /// Peak memory, in bytes.
    pub memory_bytes: u64,
    /// Peak memory as a share of the memory of the device.
    pub memory_share: f64,
    /// Seconds per step.
    pub seconds: f64,
    /// Share of that time spent waiting for data.
    pub data_share: f64,
    /// Samples that all ranks together have trained on since step 1.
    pub samples_seen: u64,
    /// Load of the experts of every layer; empty for a model without experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_loads: Vec<ExpertLoad>,
    /// Time and bandwidth of token dispatch and combine; `None` without expert parallelism.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_traffic: Option<ExpertTraffic>,
}

impl StepMetrics {
    /// The largest expert load divided by the mean load, in the layer with the highest imbalance.
    pub fn imbalance(&self) -> Option<f64> {
        let loads = self.expert_loads.iter().map(ExpertLoad::imbalance);
        loads.max_by(f64::total_cmp)
    }

    /// The share of rows dropped at expert capacity, in the layer with the highest share.
    pub fn dropped_share(&self) -> Option<f64> {
        let shares = self.expert_loads.iter().map(ExpertLoad::dropped_share);
        shares.max_by(f64::total_cmp)
    }

    /// Peak memory in GiB.
    pub fn memory_gib(&self) -> f64 {
        self.memory_bytes as f64 / (1u64 << 30) as f64
    }
}

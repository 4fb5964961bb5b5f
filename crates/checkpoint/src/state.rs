//! Everything of a job's state that is no tensor.

use serde::{Deserialize, Serialize};

/// Where a job stands, beside its tensors.
///
/// There is no state of random numbers: what is random depends on the seed, the step, the layer and
/// the sample alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    /// Optimiser steps taken.
    pub step: u64,
    /// Samples seen over all ranks.
    pub samples_seen: u64,
    /// The seed of weights and data.
    pub seed: u64,
    /// How many ranks there were.
    pub world_size: usize,
    /// The config, as TOML.
    pub config: String,
    /// What has its own pace, as the trainer describes it: the loss scale of float16. The learning rate
    /// follows from the config and the step.
    pub schedule: serde_json::Value,
}

//! The part of a job's state that is not tensors.

use serde::{Deserialize, Serialize};

/// The progress and the configuration of a job at the step of its checkpoint.
///
/// It holds no random-number state: every random value depends only on the seed, the step, the layer and
/// the sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    /// Optimizer steps taken.
    pub step: u64,
    /// Samples consumed by all ranks together.
    pub samples_seen: u64,
    /// The seed of the initial weights and of the data order.
    pub seed: u64,
    /// The number of ranks that wrote the checkpoint.
    pub world_size: usize,
    /// The job's config, as TOML.
    pub config: String,
    /// State that the trainer cannot derive from the config and the step, such as the loss scale of
    /// float16.
    pub extra_state: serde_json::Value,
}

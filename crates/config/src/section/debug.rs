//! `[debug]`: seed and determinism.

use std::path::PathBuf;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

/// What a bit is flipped in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BitFlip {
    /// A parameter.
    Parameter,
    /// A reduced gradient.
    Gradient,
    /// An optimizer state.
    State,
}

/// `[debug]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct DebugSection {
    /// The seed of initial weights, synthetic data, shuffling and dropout.
    pub seed: u64,
    /// Whether only deterministic kernels may run.
    pub deterministic: bool,
    /// A directory under `job.dump_folder` in which every rank logs its samples; none if absent.
    pub sample_log_folder: Option<PathBuf>,
    /// The skew of routing towards the first experts, as the exponent of a power law, to measure the cost of unequal
    /// loads. A dry run, which has no tokens, uses it for the loads; 0 is an equal load.
    pub routing_skew: f64,
    /// The position of a sample whose loss is NaN, to test what the job does about it; none if absent.
    pub bad_sample: Option<u64>,
    /// A rank whose loss is NaN, to test the same; none if absent.
    pub bad_rank: Option<usize>,
    /// The step of that; every step if absent.
    pub bad_step: Option<u64>,
    /// What a bit is flipped in, on one rank in one step, to test that it is found; none if absent.
    pub flip_bit: Option<BitFlip>,
    /// The step of that.
    pub flip_bit_step: u64,
    /// The rank of that.
    pub flip_bit_rank: usize,
    /// The value guard is off in every second block of that many steps, to measure what it costs; never if absent.
    pub guard_cost_block: Option<u64>,
}

impl Default for DebugSection {
    fn default() -> Self {
        DebugSection {
            seed: 1,
            deterministic: false,
            sample_log_folder: None,
            routing_skew: 0.0,
            bad_sample: None,
            bad_rank: None,
            bad_step: None,
            flip_bit: None,
            flip_bit_step: 1,
            flip_bit_rank: 0,
            guard_cost_block: None,
        }
    }
}

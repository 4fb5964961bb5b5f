//! Local updates: replicas that take optimizer steps of their own.

use serde::{Deserialize, Serialize};
use trainyard_arch::DecoderConfig;
use trainyard_cost::{Encoding, OUTER_WIDTH, OuterStates};

use crate::Compression;
use crate::compression::Wire;

/// How replicas that take optimizer steps of their own are joined: the keys of `[local_updates]`.
#[derive(Copy, Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct LocalUpdates {
    /// The outer optimizer.
    pub method: LocalUpdateMethod,
    /// Steps between two outer steps.
    pub sync_steps: u64,
    /// The number of parts of the model that are joined at different steps.
    pub num_fragments: usize,
    /// Steps during which the communication of a fragment overlaps with training.
    pub fragment_sync_delay: u64,
    /// Compression of the outer gradients; `sparse_loco` has its own.
    pub compression: Compression,
}

/// The outer optimizer.
#[derive(Copy, Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LocalUpdateMethod {
    /// Parameters are averaged.
    LocalSgd,
    /// SGD with Nesterov momentum.
    Diloco,
    /// SGD with the largest movements in 2 bits, and error feedback.
    SparseLoco {
        /// The share that is sent.
        share: f64,
    },
}

impl LocalUpdateMethod {
    /// The value of the config key.
    pub const fn name(self) -> &'static str {
        match self {
            LocalUpdateMethod::LocalSgd => "local_sgd",
            LocalUpdateMethod::Diloco => "diloco",
            LocalUpdateMethod::SparseLoco { .. } => "sparse_loco",
        }
    }

    const fn is_sparse(self) -> bool {
        matches!(self, LocalUpdateMethod::SparseLoco { .. })
    }
}

impl LocalUpdates {
    /// The interval of INTELLECT-1, which is also the default of `local_updates.sync_steps`. DiLoCo's authors used 500.
    pub const SYNC_STEPS: u64 = 100;

    /// A method with uncompressed outer gradients, and training that waits for them.
    pub const fn plain(method: LocalUpdateMethod) -> LocalUpdates {
        LocalUpdates {
            method,
            sync_steps: LocalUpdates::SYNC_STEPS,
            num_fragments: 1,
            fragment_sync_delay: 0,
            compression: Compression::None,
        }
    }

    /// Whether outer gradients are encoded in blocks, which does not work with tensor and pipeline parallelism.
    pub const fn encodes_blocks(&self) -> bool {
        self.method.is_sparse() || self.compression.encodes_blocks()
    }

    /// Bytes that the outer loop keeps for `num_parameters` parameters of a rank.
    pub(crate) fn state_bytes(&self, num_parameters: u64) -> u64 {
        let states = OuterStates {
            has_momentum: self.method == LocalUpdateMethod::Diloco,
            keeps_errors: self.method.is_sparse() || self.compression.keeps_errors(),
        };
        states.bytes(num_parameters)
    }

    pub(crate) fn wire(&self, shape: &DecoderConfig) -> Wire {
        match self.method {
            LocalUpdateMethod::SparseLoco { share } => {
                let kept = Encoding::num_kept(share) as u64;
                Wire::Gathered(Encoding::TwoBitTopK(kept))
            }
            _ => self.compression.wire(shape, OUTER_WIDTH as usize),
        }
    }

    /// Steps of training during which a fragment may be sent without delaying another one.
    pub(crate) fn overlapped_steps(&self) -> f64 {
        let between = self.sync_steps as f64 / self.num_fragments.max(1) as f64;
        (self.fragment_sync_delay as f64).min(between)
    }
}

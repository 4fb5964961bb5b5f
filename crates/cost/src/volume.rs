//! Bytes that a step communicates.

use std::iter::Sum;

/// How often a step communicates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommCounts {
    /// Forward and backward passes.
    pub num_microbatches: u64,
    /// Reductions of sharded gradients.
    pub num_reductions: u64,
    /// How often all parameters are gathered for several passes; none if each pass gathers them itself.
    pub num_gathers: Option<u64>,
}

impl CommCounts {
    /// Every micro-batch gathers parameters and reduces gradients itself.
    pub fn per_microbatch(num_microbatches: usize) -> CommCounts {
        CommCounts {
            num_microbatches: num_microbatches as u64,
            num_reductions: num_microbatches as u64,
            num_gathers: None,
        }
    }
}

/// Bytes communicated in one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Volume {
    /// Gradient bytes that one rank passes to reducing collectives.
    pub reduced: u64,
    /// Gradient bytes that all ranks together send.
    pub gradients: u64,
    /// Bytes of parameters and buffers that all ranks together send.
    pub parameters: u64,
}

/// The volume of one all-reduce of `bytes` of gradients over `num_ranks`: a reduce-scatter and an all-gather.
pub fn replicated_volume(bytes: u64, num_ranks: usize) -> Volume {
    Volume {
        reduced: bytes,
        gradients: 2 * (num_ranks as u64 - 1) * bytes,
        parameters: 0,
    }
}

/// The volume of a broadcast of `bytes` of parameters or buffers to `num_ranks`.
pub fn broadcast_volume(bytes: u64, num_ranks: usize) -> Volume {
    Volume {
        parameters: (num_ranks as u64 - 1) * bytes,
        ..Volume::default()
    }
}

/// Sizes of gradients with a partial placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartialGradBytes {
    /// Bytes that this rank holds.
    pub local: u64,
    /// Bytes of the full parameters, over all ranks that shard one replica.
    pub full: u64,
    /// Number of ranks that hold partial sums of the same gradient.
    pub num_ranks: u64,
}

impl Volume {
    /// The volume of `num_groups` groups that each do the same.
    #[must_use]
    pub fn times(self, num_groups: usize) -> Volume {
        let times = num_groups as u64;
        Volume {
            reduced: self.reduced,
            gradients: times * self.gradients,
            parameters: times * self.parameters,
        }
    }

    /// Adds the all-reduce of partial gradients, with `num_replicas` replicas of the parameters.
    #[must_use]
    pub fn with_partial_grads(
        mut self,
        partial: &[PartialGradBytes],
        num_replicas: usize,
    ) -> Volume {
        for bytes in partial {
            self.reduced += bytes.local;
            self.gradients += num_replicas as u64 * 2 * (bytes.num_ranks - 1) * bytes.full;
        }
        self
    }
}

impl Sum for Volume {
    fn sum<I: Iterator<Item = Volume>>(volumes: I) -> Volume {
        volumes.fold(Volume::default(), |sum, volume| Volume {
            reduced: sum.reduced + volume.reduced,
            gradients: sum.gradients + volume.gradients,
            parameters: sum.parameters + volume.parameters,
        })
    }
}

//! Memory that no tensor accounts for, each part with its source.

use crate::{Degrees, SourcedValue};

/// Memory of a rank that is not in tensors, in bytes.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Overhead {
    /// The driver's context.
    pub context: f64,
    /// Buffers of NCCL's communicators.
    pub communicators: f64,
    /// Workspaces of matrix products.
    pub workspaces: f64,
    /// What the caching allocator reserves beyond its tensors.
    pub fragmentation: f64,
}

impl Overhead {
    /// The sum of all.
    pub const fn total(&self) -> f64 {
        self.context + self.communicators + self.workspaces + self.fragmentation
    }
}

/// The sizes of what no tensor accounts for.
#[derive(Clone, Debug, PartialEq)]
pub struct Overheads {
    /// Bytes of the driver's context.
    pub context: SourcedValue,
    /// Bytes of a communicator whose ranks form a ring.
    pub communicator: SourcedValue,
    /// Bytes per peer of a group whose ranks exchange data pairwise, beyond those of a ring.
    pub peer: SourcedValue,
    /// Bytes of workspaces of matrix products.
    pub workspaces: SourcedValue,
    /// What the caching allocator reserves beyond its tensors, as a fraction of their bytes.
    pub fragmentation: SourcedValue,
}

const MIB: f64 = 1024.0 * 1024.0;

/// Pairwise connections are made over the links of a node; ranks of other nodes share their buffers.
const MOST_PEERS: usize = 7;

impl Overheads {
    /// No overhead, to compare tensor bytes only.
    pub fn none() -> Overheads {
        let nothing = || SourcedValue::assumed(0.0, "only tensors are counted");
        Overheads {
            context: nothing(),
            communicator: nothing(),
            peer: nothing(),
            workspaces: nothing(),
            fragmentation: nothing(),
        }
    }

    /// The overhead of Megatron-DeepSpeed in 2022: what the driver reported, compared with its tensors. It includes
    /// allocator caches, communicators, and buckets of half a billion elements.
    pub fn deepspeed_2022() -> Overheads {
        Overheads {
            context: SourcedValue::assumed(
                1024.0 * MIB,
                "before CUDA 11.7 a context held all kernels, more than 1000 MB: pytorch/pytorch#107667",
            ),
            communicator: SourcedValue::assumed(0.0, "part of the measured 31 %"),
            peer: SourcedValue::assumed(0.0, "part of the measured 31 %"),
            workspaces: SourcedValue::assumed(0.0, "part of the measured 31 %"),
            fragmentation: SourcedValue::measured(
                0.31,
                "BLOOM's 16-bit trial runs with full recomputation, bigscience \
                 tr11-176B-ml/chronicles-prequel.md",
            ),
        }
    }

    /// The overhead of a rank whose tensors take so many bytes.
    pub fn of(&self, degrees: &Degrees, tensors: f64) -> Overhead {
        let groups = degrees.axes().into_iter().filter(|(_, size)| *size > 1);
        // Every axis has a communicator, and all ranks have one.
        let num_communicators = match groups.count() {
            0 => 0.0,
            axes => (axes + 1) as f64,
        };
        let num_peers = (degrees.ep - 1).min(MOST_PEERS) as f64;
        Overhead {
            context: self.context.value,
            communicators: num_communicators * self.communicator.value
                + num_peers * self.peer.value,
            workspaces: self.workspaces.value,
            fragmentation: self.fragmentation.value * tensors,
        }
    }
}

impl Default for Overheads {
    fn default() -> Overheads {
        Overheads {
            context: SourcedValue::measured(
                426.0 * MIB,
                "PyTorch 2.10 with CUDA 13 on an RTX 6000 Ada, unslothai/unsloth-zoo#1053",
            ),
            communicator: SourcedValue::assumed(
                240.0 * MIB,
                "24 channels with buffers of 10 MiB for NCCL's three protocols (NCCL 2.30, src/init.cc; \
                 NVIDIA/nccl#1685)",
            ),
            peer: SourcedValue::measured(
                469.0 * MIB,
                "an all-to-all of 8 H100 takes 3.28 GB more, NVIDIA/nccl#1685",
            ),
            workspaces: SourcedValue::specified(
                64.0 * MIB,
                "two threads with 32 MiB each on Hopper, 8 MiB on others: CUBLAS_WORKSPACE_CONFIG",
            ),
            fragmentation: SourcedValue::measured(
                0.04,
                "CUDA's caching allocator on a simulated GPU: the highest of twelve plans, docs/src/planner.md",
            ),
        }
    }
}

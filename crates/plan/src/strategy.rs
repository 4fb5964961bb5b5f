//! A parallelization strategy: how one training step is split over ranks.

use std::fmt;

use serde::{Deserialize, Serialize};
use trainyard_mesh::{Axis, Mesh, MeshError};
use trainyard_schedule::ScheduleKind;

use crate::{Software, Synchronization};

/// How one training step is split over ranks: the choices that a planner makes and a framework's config states.
#[derive(Clone, Debug, PartialEq)]
pub struct Strategy {
    /// The size of every mesh axis.
    pub degrees: Degrees,
    /// The ZeRO stage over `dp_shard`: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters.
    pub zero_stage: usize,
    /// Whether tensor-parallel ranks shard activations along the sequence between matrix products.
    pub sequence_parallel: bool,
    /// The pipeline schedule and stages per rank; ignored without pipeline parallelism.
    pub pipeline: PipelineLayout,
    /// The first block of every pipeline stage but the first; empty if the blocks are divided evenly.
    pub split_points: Vec<usize>,
    /// Samples in a step, over all ranks.
    pub global_batch: usize,
    /// Samples in a micro-batch of one rank.
    pub micro_batch: usize,
    /// Tokens of a sample.
    pub seq_len: usize,
    /// Which activations the backward pass recomputes.
    pub recompute: Recompute,
    /// Where parameters and optimizer states are kept while they are not in use.
    pub offload: Offload,
    /// Bytes per element of everything that is stored or communicated.
    pub precision: Precision,
    /// When and how replicas exchange gradients or parameters.
    pub synchronization: Synchronization,
}

/// The sizes of the mesh's axes, outermost first; `ep` spans `dp_shard x cp x tp`.
#[derive(Copy, Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Degrees {
    /// Replicas that take optimizer steps of their own, or exchange gradients with servers.
    pub dp_outer: usize,
    /// Pipeline parallel: ranks that hold different layers.
    pub pp: usize,
    /// Data-parallel replicas, each with a full copy of the (possibly sharded) model.
    pub dp_replicate: usize,
    /// Data-parallel ranks that shard the states of one replica.
    pub dp_shard: usize,
    /// Context parallel: ranks that shard each sequence.
    pub cp: usize,
    /// Tensor parallel: ranks that shard every matrix.
    pub tp: usize,
    /// Expert parallel: ranks that hold different experts.
    pub ep: usize,
}

impl Degrees {
    /// A single rank.
    pub const ONE: Degrees = Degrees {
        dp_outer: 1,
        pp: 1,
        dp_replicate: 1,
        dp_shard: 1,
        cp: 1,
        tp: 1,
        ep: 1,
    };

    /// The axes by name, outermost first.
    pub const fn axes(&self) -> [(&'static str, usize); 7] {
        [
            ("dp_outer", self.dp_outer),
            ("pp", self.pp),
            ("dp_replicate", self.dp_replicate),
            ("dp_shard", self.dp_shard),
            ("cp", self.cp),
            ("tp", self.tp),
            ("ep", self.ep),
        ]
    }

    /// The device mesh of these sizes.
    pub fn mesh(&self) -> Result<Mesh, MeshError> {
        let sizes = [
            (Axis::DpOuter, self.dp_outer),
            (Axis::Pp, self.pp),
            (Axis::DpReplicate, self.dp_replicate),
            (Axis::DpShard, self.dp_shard),
            (Axis::Cp, self.cp),
            (Axis::Tp, self.tp),
        ];
        Mesh::new(&sizes)?.with_ep(self.ep)
    }

    /// The number of ranks.
    pub const fn world_size(&self) -> usize {
        self.dp_outer * self.replica_size()
    }

    /// The number of ranks of one of the `dp_outer` replicas.
    pub const fn replica_size(&self) -> usize {
        self.pp * self.stage_size()
    }

    /// The data-parallel degree: how many ranks compute different samples.
    pub const fn data_parallel(&self) -> usize {
        self.dp_outer * self.dp_replicate * self.dp_shard
    }

    /// The number of ranks of one pipeline stage.
    pub const fn stage_size(&self) -> usize {
        self.dp_replicate * self.dp_shard * self.cp * self.tp
    }

    /// The number of ranks that shard an expert's states after expert parallelism.
    pub const fn expert_shard(&self) -> usize {
        self.dp_shard * self.cp * self.tp / self.ep
    }
}

/// The pipeline schedule and how many stages each rank holds.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub struct PipelineLayout {
    /// The order of forward and backward passes.
    pub schedule: ScheduleKind,
    /// Pipeline stages per rank (virtual stages).
    pub stages_per_rank: usize,
}

/// Which activations the backward pass recomputes instead of saving them.
#[derive(Copy, Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// None: all activations are saved.
    None,
    /// The core attention of every block (Megatron's selective recomputation).
    Selective,
    /// Every second matrix product of a block and all element-wise operators, but not attention (torchtitan's
    /// `selective` with option `op`). The search does not try it.
    SelectiveOp,
    /// Whole transformer blocks; only their inputs are saved.
    Full,
}

/// Where parameters and optimizer states are kept while they are not in use.
#[derive(Copy, Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// In device memory.
    None,
    /// In the node's host memory.
    Cpu,
    /// On the node's NVMe disks.
    Nvme,
}

/// Bytes per element of everything that is stored or communicated.
#[derive(Copy, Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Precision {
    /// Activations and matrix products.
    pub compute: usize,
    /// A parameter as layers read it: cast on use, or a copy beside the optimizer's master weight.
    pub parameter: usize,
    /// A gradient as the backward pass produces it.
    pub gradient: usize,
    /// A gradient shard after the reduce-scatter.
    pub reduced: usize,
    /// All optimizer states of one parameter, including a master weight if there is one.
    pub optimizer: usize,
}

impl Precision {
    /// Parameters in bfloat16 with fp32 master weights, as most frameworks keep them.
    pub const BF16: Precision = Precision {
        compute: 2,
        parameter: 2,
        gradient: 4,
        reduced: 4,
        optimizer: 12,
    };

    /// Parameters in fp32, cast to bfloat16 for compute; no separate master weights.
    pub const MIXED: Precision = Precision {
        parameter: 4,
        optimizer: 8,
        ..Precision::BF16
    };

    /// fp32 throughout.
    pub const FP32: Precision = Precision {
        compute: 4,
        ..Precision::MIXED
    };
}

impl Precision {
    /// Bytes per element of a parameter's copy in the compute type: 0 if layers read the parameter itself.
    pub(crate) const fn cast(&self) -> usize {
        if self.parameter > self.compute {
            self.compute
        } else {
            0
        }
    }
}

/// The precision by ZeRO stage: frameworks keep other copies beside shards than beside full parameters.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(transparent)]
pub struct PrecisionByStage([Precision; 4]);

impl PrecisionByStage {
    /// The same precision at every stage.
    pub const fn same(precision: Precision) -> PrecisionByStage {
        PrecisionByStage([precision; 4])
    }

    /// Trainyard's precision for `compute` bytes in layers and `parameter` bytes per weight. There is one copy of
    /// everything until states are sharded. Then layers and gradients use the compute type, and every rank keeps
    /// its shard of the weights and of the reduced gradients in the parameter type beside the optimizer states.
    pub const fn trainyard(compute: usize, parameter: usize) -> PrecisionByStage {
        let replicated = Precision {
            compute,
            parameter,
            gradient: parameter,
            reduced: parameter,
            optimizer: 2 * parameter,
        };
        let master = if compute == parameter { 0 } else { parameter };
        let sharded = Precision {
            parameter: compute,
            gradient: compute,
            optimizer: 2 * parameter + master,
            ..replicated
        };
        PrecisionByStage([replicated, sharded, sharded, sharded])
    }

    /// The precision at this ZeRO stage.
    pub const fn at(&self, zero_stage: usize) -> Precision {
        self.0[if zero_stage < 4 { zero_stage } else { 3 }]
    }
}

impl Strategy {
    /// The same strategy with these split points; they are omitted if they divide the blocks evenly.
    #[must_use]
    pub fn with_split_points(self, split_points: Vec<usize>, num_blocks: usize) -> Strategy {
        let starts = |strategy: &Strategy| -> Vec<usize> {
            let stages = 1..strategy.num_stages();
            let blocks = stages.map(|stage| strategy.blocks_of(num_blocks, stage).start);
            blocks.collect()
        };
        let even = Strategy {
            split_points: Vec::new(),
            ..self
        };
        if starts(&even) == split_points {
            return even;
        }
        Strategy {
            split_points,
            ..even
        }
    }

    /// Whether parameters are gathered before they are used.
    pub fn gathers_parameters(&self) -> bool {
        self.zero_stage == 3 || self.offload != Offload::None
    }

    /// Over how many ranks activations between matrix products are sharded.
    pub(crate) const fn shards_between_products(&self) -> f64 {
        if self.sequence_parallel {
            self.degrees.tp as f64
        } else {
            1.0
        }
    }

    /// Over how many ranks the saved inputs of matrix products are sharded: sequence parallelism gathers them, and
    /// either keeps them until the backward pass or gathers them again.
    pub(crate) fn shards_of_inputs(&self, software: &Software) -> f64 {
        if software.gathers_sequence_again {
            self.shards_between_products()
        } else {
            1.0
        }
    }

    /// Micro-batches that a rank computes in a step.
    pub const fn num_microbatches(&self) -> usize {
        self.global_batch / (self.degrees.data_parallel() * self.micro_batch)
    }
}

/// Formats the axes larger than one, as in `pp16 dp_shard128 tp8`.
impl fmt::Display for Degrees {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = self.axes().into_iter().filter(|(_, size)| *size > 1);
        let axes: Vec<String> = shared.map(|(axis, size)| format!("{axis}{size}")).collect();
        if axes.is_empty() {
            f.pad("one rank")
        } else {
            f.pad(&axes.join(" "))
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::SelectiveOp => "selective_op",
            Recompute::Full => "full",
        })
    }
}

impl fmt::Display for PipelineLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stages_per_rank {
            1 => f.pad(self.schedule.name()),
            stages => f.pad(&format!("{} x{stages}", self.schedule.name())),
        }
    }
}

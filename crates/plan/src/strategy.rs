//! One way to split a step over ranks.

use std::fmt;

use serde::{Deserialize, Serialize};
use trainyard_mesh::{Axis, Mesh, MeshError};
use trainyard_schedule::Kind;

/// One way to split a step over ranks: the choices that a planner makes and a framework's config states.
#[derive(Clone, Debug, PartialEq)]
pub struct Strategy {
    /// How many ranks share what.
    pub degrees: Degrees,
    /// What `dp_shard` ranks shard: 0 nothing, 1 optimiser states, 2 gradients too, 3 parameters too.
    pub zero_stage: usize,
    /// Whether tensor-parallel ranks share the positions between matrices.
    pub sequence_parallel: bool,
    /// How the layers lie on a pipeline's ranks; none without a pipeline.
    pub layers: Layers,
    /// Samples in a step, over all ranks.
    pub global_batch: usize,
    /// Samples a rank computes with at a time.
    pub micro_batch: usize,
    /// Tokens of a sample.
    pub seq_len: usize,
    /// What backward computes again.
    pub recompute: Recompute,
    /// Where states lie while nobody computes with them.
    pub offload: Offload,
    /// In which types things are held and computed.
    pub precision: Precision,
}

/// The sizes of the mesh's axes, outermost first; `ep` is laid over `dp_shard x cp x tp`.
#[derive(Copy, Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Degrees {
    /// Ranks that share the layers.
    pub pp: usize,
    /// Copies of the model that see different data.
    pub dp_replicate: usize,
    /// Ranks that see different data and share one copy's states.
    pub dp_shard: usize,
    /// Ranks that share a sequence.
    pub cp: usize,
    /// Ranks that share every matrix.
    pub tp: usize,
    /// Ranks that share the experts.
    pub ep: usize,
}

impl Degrees {
    /// One rank.
    pub const ONE: Degrees = Degrees {
        pp: 1,
        dp_replicate: 1,
        dp_shard: 1,
        cp: 1,
        tp: 1,
        ep: 1,
    };

    /// The axes by name, outermost first.
    pub const fn axes(&self) -> [(&'static str, usize); 6] {
        [
            ("pp", self.pp),
            ("dp_replicate", self.dp_replicate),
            ("dp_shard", self.dp_shard),
            ("cp", self.cp),
            ("tp", self.tp),
            ("ep", self.ep),
        ]
    }

    /// The mesh of these sizes.
    pub fn mesh(&self) -> Result<Mesh, MeshError> {
        let sizes = [
            (Axis::Pp, self.pp),
            (Axis::DpReplicate, self.dp_replicate),
            (Axis::DpShard, self.dp_shard),
            (Axis::Cp, self.cp),
            (Axis::Tp, self.tp),
        ];
        Mesh::new(&sizes)?.with_ep(self.ep)
    }

    /// How many ranks there are.
    pub const fn world_size(&self) -> usize {
        self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp
    }

    /// How many batches are computed side by side.
    pub const fn data_parallel(&self) -> usize {
        self.dp_replicate * self.dp_shard
    }

    /// How many ranks share what is left of an expert's states after `ep`.
    pub const fn expert_shard(&self) -> usize {
        self.dp_shard * self.cp * self.tp / self.ep
    }
}

/// How the layers lie on a pipeline's ranks.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub struct Layers {
    /// The order of the ranks' work.
    pub schedule: Kind,
    /// Stages each rank has.
    pub stages_per_rank: usize,
}

/// What backward computes again instead of keeping it.
#[derive(Copy, Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing.
    None,
    /// The attention of every block.
    Selective,
    /// Every second matrix product of a block, and what passes over memory, but not attention: what
    /// torchtitan calls selective. No search tries it.
    Products,
    /// Every block.
    Full,
}

/// Where parameters and optimiser states lie while nobody computes with them.
#[derive(Copy, Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// With the layers.
    None,
    /// In the machine's main memory.
    Cpu,
    /// On its disks.
    Nvme,
}

/// The bytes of an element of each thing there is.
#[derive(Copy, Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Precision {
    /// What layers compute with.
    pub compute: usize,
    /// A parameter, as layers find it: cast when needed, or a copy beside the optimiser's.
    pub parameter: usize,
    /// A gradient, as backward leaves it.
    pub gradient: usize,
    /// A gradient, as ranks that shard it add it up.
    pub reduced: usize,
    /// The optimiser's states of a parameter together: with its master copy, if it has one.
    pub optimizer: usize,
}

impl Precision {
    /// Weights in bfloat16 beside the optimiser's in single precision, as most frameworks hold them.
    pub const BF16: Precision = Precision {
        compute: 2,
        parameter: 2,
        gradient: 4,
        reduced: 4,
        optimizer: 12,
    };

    /// Weights in single precision, cast to bfloat16 where layers compute; one copy of everything.
    pub const MIXED: Precision = Precision {
        parameter: 4,
        optimizer: 8,
        ..Precision::BF16
    };

    /// Single precision throughout.
    pub const FP32: Precision = Precision {
        compute: 4,
        ..Precision::MIXED
    };
}

/// How numbers are held, by what is sharded: frameworks keep other copies beside shards than beside wholes.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Held([Precision; 4]);

impl Held {
    /// The same whatever is sharded.
    pub const fn same(precision: Precision) -> Held {
        Held([precision; 4])
    }

    /// As our own code holds them, where layers compute with `compute` bytes and weights have `held`: one
    /// copy of all, until states are sharded. Then layers find a copy in their own type, gradients come in it,
    /// and every rank holds its share of the weights and of the reduced gradients beside the optimiser's.
    pub const fn ours(compute: usize, held: usize) -> Held {
        let whole = Precision {
            compute,
            parameter: held,
            gradient: held,
            reduced: held,
            optimizer: 2 * held,
        };
        let master = if compute == held { 0 } else { held };
        let sharded = Precision {
            parameter: compute,
            gradient: compute,
            optimizer: 2 * held + master,
            ..whole
        };
        Held([whole, sharded, sharded, sharded])
    }

    /// Where this stage of ZeRO shards.
    pub const fn at(&self, zero_stage: usize) -> Precision {
        self.0[if zero_stage < 4 { zero_stage } else { 3 }]
    }
}

impl Strategy {
    /// Micro-batches a rank computes in a step.
    pub const fn num_microbatches(&self) -> usize {
        self.global_batch / (self.degrees.data_parallel() * self.micro_batch)
    }
}

/// The axes that more than one rank shares, as in `pp16 dp_shard128 tp8`.
impl fmt::Display for Degrees {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = self.axes().into_iter().filter(|(_, size)| *size > 1);
        let words: Vec<String> = shared.map(|(axis, size)| format!("{axis}{size}")).collect();
        match words.is_empty() {
            true => f.pad("one rank"),
            false => f.pad(&words.join(" ")),
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Products => "products",
            Recompute::Full => "full",
        })
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stages_per_rank {
            1 => f.pad(self.schedule.name()),
            stages => f.pad(&format!("{} x{stages}", self.schedule.name())),
        }
    }
}

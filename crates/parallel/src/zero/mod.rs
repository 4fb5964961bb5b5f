//! Sharded data parallelism (FSDP): ZeRO's three stages and hybrid sharding, by one mechanism.
//!
//! The parameters of a unit are concatenated into one flat parameter, of which every rank holds a chunk. There are
//! three operations on a flat parameter: gather it, release it, and reduce-scatter its gradients to the chunks. The
//! stages differ only in when these run:
//!
//! | stage | gathered | released | gradients |
//! |---|---|---|---|
//! | [`Stage::OptimizerStates`] | once after each optimizer step | never | unsharded, reduced once per step |
//! | [`Stage::Gradients`] | once after each optimizer step | never | reduced as each unit finishes backward |
//! | [`Stage::Parameters`] | before each unit's forward and backward | after each | as in stage 2 |
//!
//! ```no_run
//! # use trainyard_parallel::{FullyShard, ShardOptions, DataParallelWrapper, GradSync};
//! # use trainyard_nn::{Context, Decoder, Model};
//! # fn step(model: Decoder, world: trainyard_torch::World, x: tch::Tensor, y: tch::Tensor) -> trainyard_parallel::Result<()> {
//! let model = FullyShard::new(model, &world, ShardOptions::default())?;
//! let run = model.forward(&x, &Context::training(0))?;
//! let loss = model.loss(run.output(), &y)? / y.numel() as f64;
//! model.backward(run, &loss, GradSync::Full)?; // every rank now has its shard of the gradients
//! # Ok(())
//! # }
//! ```

mod flat_param_handle;
mod fsdp_state;
mod fully_shard;
mod hooks;
mod offload_file;
mod offloaded_states;
mod pool;
mod prefetch;
mod wrap_policy;

use std::rc::Rc;
use std::sync::Arc;

use trainyard_mesh::{Axis, AxisSet, Layout};
use trainyard_nn::UnitHooks;
use trainyard_torch::ReduceOp;

use crate::buffers::BroadcastBuffers;
use crate::compress::Codec;
use crate::precision::Precision;

pub use fully_shard::{FullyShard, fully_shard};
pub use offload_file::{OffloadOptions, OffloadStates};
use trainyard_cost::{Reshard, Stage};
pub use wrap_policy::WrapPolicy;

/// Options of [`FullyShard`].
pub struct ShardOptions {
    /// The ZeRO stage.
    pub stage: Stage,
    /// Types of parameters, gradients and outputs.
    pub precision: Precision,
    /// `Mean` if the loss is a mean over the rank's own samples, `Sum` if it is already divided by the global
    /// count.
    pub op: ReduceOp,
    /// Whether parameters are released after forward; stage 3 only.
    pub reshard_after_forward: Reshard,
    /// Number of units to gather ahead; stage 3 only.
    pub prefetch: usize,
    /// Whether the states of experts are sharded too, over the ranks that hold the same experts. If not, these ranks hold
    /// replicas, and all-reduce their gradients.
    pub shard_experts: bool,
    /// Which units share a flat parameter.
    pub wrap_policy: WrapPolicy,
    /// Which buffers are broadcast before a forward pass.
    pub broadcast_buffers: BroadcastBuffers,
    /// Whether communication overlaps computation. Results are bitwise the same.
    pub overlap: bool,
    /// How gradients are encoded when they are reduced; none sends them in the type of the precision.
    pub gradient_codec: Option<Arc<dyn Codec>>,
    /// How parameters are encoded when they are gathered; stage 3 only, because other stages compute with the optimizer's
    /// own copy of a shard.
    pub parameter_codec: Option<Arc<dyn Codec>>,
    /// Whether states are sharded over the replicas too. The ranks of a replica then share a second copy of the
    /// parameters, from which they are gathered after the first time in a step; stage 3 only.
    pub secondary_shards: bool,
    /// Which states are offloaded while they are not in use, and where to; none keeps them in memory.
    pub offload: Option<OffloadOptions>,
    /// Additional hooks around each unit, such as activation checkpointing. They run while the unit is gathered.
    pub unit_hooks: Vec<Rc<dyn UnitHooks>>,
}

impl Default for ShardOptions {
    fn default() -> Self {
        ShardOptions {
            stage: Stage::default(),
            precision: Precision::default(),
            op: ReduceOp::Mean,
            reshard_after_forward: Reshard::default(),
            prefetch: 1,
            shard_experts: true,
            wrap_policy: WrapPolicy::default(),
            broadcast_buffers: BroadcastBuffers::default(),
            overlap: true,
            gradient_codec: None,
            parameter_codec: None,
            secondary_shards: false,
            offload: None,
            unit_hooks: Vec::new(),
        }
    }
}

/// The axes over which states are sharded. Ranks along `cp` hold the same model and process different positions of
/// the same sequences, so they shard its states too.
pub fn shard_axes() -> AxisSet {
    AxisSet::of([Axis::DpShard, Axis::Cp])
}

/// How the states of dense parameters, or those of experts, are sharded.
struct GroupSharding {
    stage: Stage,
    /// The axes over which states are sharded.
    axes: AxisSet,
    /// The axes along which other ranks hold the same shards.
    replica_axes: AxisSet,
    /// The axes over which the second copy of the parameters is sharded.
    secondary_axes: Option<AxisSet>,
}

impl GroupSharding {
    fn of(layout: &Layout, options: &ShardOptions) -> GroupSharding {
        let replicas = Axis::DpReplicate;
        if !layout.is_expert() || options.shard_experts {
            let axes = if layout.is_expert() {
                Axis::Efsdp.into()
            } else {
                shard_axes()
            };
            return if options.secondary_shards {
                GroupSharding {
                    stage: options.stage,
                    axes: axes.union(replicas.into()),
                    replica_axes: AxisSet::default(),
                    secondary_axes: Some(axes),
                }
            } else {
                GroupSharding {
                    stage: options.stage,
                    axes,
                    replica_axes: replicas.into(),
                    secondary_axes: None,
                }
            };
        }
        GroupSharding {
            // With a single shard nothing is sharded, and parameters stay where they are.
            stage: Stage::OptimizerStates,
            axes: AxisSet::default(),
            replica_axes: AxisSet::of([replicas, Axis::Efsdp]),
            secondary_axes: None,
        }
    }
}

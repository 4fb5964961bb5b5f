//! Parallelism strategies: they wrap a model so that it trains on many ranks.
//!
//! - [`Ddp`]: every rank holds a replica of the model and processes a part of the batch; gradients are all-reduced
//!   in buckets while backward runs.
//! - [`FullyShard`]: the model states are sharded over ranks (ZeRO 1, 2, 3, hybrid) and gathered unit by unit when
//!   needed.
//! - [`Pipeline`]: each rank holds some layers, and ranks work on different micro-batches.
//! - [`DataParallel`]: data parallelism in one process, with a thread per device.

mod buffers;
mod compress;
mod data_parallel;
mod ddp;
mod error;
mod flat;
mod join;
mod lock;
mod loss_scale;
pub mod offload;
mod outer;
mod param_state;
mod partial_grads;
mod pipeline;
mod precision;
mod recompute;
mod reducer;
mod strategy;
mod zero;

pub use buffers::BroadcastBuffers;
pub use compress::{
    AuditedReduction, BlockQuantizer, CastReduction, Codec, GradientBucket, GradientHook,
    PlainReduction, PowerSgd, PowerSgdOptions, RandomK, Reduction, SparseReduction, TopK,
    TwoBitTopK, TwoHopReduction,
};
pub use data_parallel::DataParallel;
pub use ddp::{Ddp, DdpOptions};
pub use error::{ParallelError, Result};
pub use flat::{BucketLimits, FlatParam, assign_buckets};
pub use join::{Join, JoinedStep};
pub use loss_scale::{LossScale, StepDecision, scaled};
pub use outer::{OuterLoop, OuterOptimizer, OuterOptions};
pub use param_state::ParamState;
pub use pipeline::{
    ActivationSpec, Cut, Pipeline, PipelineOptions, StageModel, TiedEmbedding, pipeline,
};
pub use precision::{Precision, cast_floating};
pub use recompute::{Recompute, RecomputeHooks, RecomputePlan, fit_to_budget};
pub use strategy::{
    DataParallelWrapper, GradSync, Microbatch, OptimizerStep, StateLoader, StateVisitor,
    StepInputs, Strategy,
};
pub use trainyard_cost::{Reshard, Stage};
pub use zero::{
    FullyShard, OffloadOptions, OffloadStates, ShardOptions, WrapPolicy, fully_shard, shard_axes,
};

//! Strategies: what makes one model train on many ranks.
//!
//! - [`Ddp`]: every rank holds the whole model and a part of the batch; gradients are reduced in
//!   buckets while backward goes on.
//! - [`FullyShard`]: the states of the model are spread over ranks (ZeRO 1, 2, 3, hybrid), and
//!   gathered unit by unit where they are needed.
//! - [`Pipeline`]: ranks share the layers, each at work on another micro-batch.
//! - [`DataParallel`]: the same in one process, with a thread per device. For one machine, quickly.

mod bucket;
mod compress;
mod data_parallel;
mod ddp;
mod error;
mod loss_scale;
pub mod offload;
mod pipeline;
mod precision;
mod recompute;
mod reducer;
mod strategy;
mod terms;
mod volume;
mod zero;

pub use bucket::{BucketLimits, assign_buckets};
pub use compress::{Bf16Compression, GradientHook, PlainReduction, Reduction};
pub use data_parallel::DataParallel;
pub use ddp::{Ddp, DdpOptions};
pub use error::{ParallelError, Result};
pub use loss_scale::{LossScale, Verdict, scaled};
pub use pipeline::{Part, Pipeline, Shape, Tie, balanced};
pub use precision::Precision;
pub use recompute::{Recompute, RecomputePlan, Recomputing, fit};
pub use strategy::{Pass, Passes, Step, Strategy, Sync, Update};
pub use volume::{ShardedModel, StateBytes, Volume, Widths, replicated_volume};
pub use zero::{
    FullyShard, OffloadOptions, Reshard, Row, ShardOptions, Stage, part, shard_axes, whole,
};

//! Strategies: what makes one model train on many ranks.
//!
//! - [`Ddp`]: every rank holds the whole model and a part of the batch; gradients are reduced in
//!   buckets while backward goes on.
//! - [`DataParallel`]: the same in one process, with a thread per device. For one machine, quickly.

mod bucket;
mod compress;
mod data_parallel;
mod ddp;
mod error;
mod reducer;

pub use bucket::{BucketLimits, assign_buckets};
pub use compress::{Bf16Compression, GradientHook, PlainReduction, Reduction};
pub use data_parallel::DataParallel;
pub use ddp::{Ddp, DdpOptions, Sync};
pub use error::{ParallelError, Result};

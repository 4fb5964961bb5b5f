//! Models as lists of units, and the layers they consist of.
//!
//! A [`Parameter`] has a global name, a global shape and a layout over the device mesh. A [`Module`] owns parameters.
//! A [`Model`] is a list of named [`Unit`]s, which [`run()`] executes one after another. A data-parallel strategy is
//! a set of [`UnitHooks`] that `run` calls around each unit, so models contain no data-parallel code. Tensor, context
//! and expert parallelism split the layers themselves: models are built with [`TensorParallel`], [`ContextParallel`]
//! and [`ExpertParallel`].
//!
//! ```no_run
//! use trainyard_arch::DecoderConfig;
//! use trainyard_nn::{Builder, Context, Decoder, Model, run};
//! # fn step(config: &DecoderConfig, inputs: &tch::Tensor, targets: &tch::Tensor) -> trainyard_nn::Result<()> {
//! let model = Decoder::build(config, 128, &Builder::new(1))?;
//! let pass = run(&model, inputs, &Context::training(0), &[])?;
//! let loss = model.loss(pass.output(), targets)? / targets.numel() as f64;
//! pass.backward(&loss)?;
//! # Ok(())
//! # }
//! ```

// The derive macro refers to this crate by its public path, which must also work inside the crate.
extern crate self as trainyard_nn;

mod adapter;
mod backward_hooks;
mod bucket_view;
mod builder;
mod cnn;
mod comm_volume;
mod context_parallel;
mod decoder;
mod documents;
pub mod dtype;
mod error;
mod experts;
mod gpt2;
pub mod init;
mod initial_values;
pub mod layers;
mod loss;
mod model;
mod module;
mod parallelize;
mod parameter;
mod parameters_by_axes;
mod recompute;
mod run;
mod shards;
mod sync_batch_norm;
mod tensor_parallel;
mod thread_bound;
mod transformer_block;
mod unit;
mod unit_hooks;
mod vit;
pub mod weight_gradients;
pub mod weights;

pub use adapter::{LossFn, UnitFn, VarStoreModel};
pub use bucket_view::BucketView;
pub use builder::{Builder, Device};
pub use cnn::SimpleCnn;
pub use context_parallel::{ContextParallel, ContextParallelMethod};
pub use decoder::Decoder;
pub use documents::Documents;
pub use error::{NnError, Result};
pub use experts::{
    ExpertLoad, ExpertParallel, Experts, MixtureOfExperts, Router, SyntheticSkew, for_each_expert,
};
pub use init::Init;
pub use loss::cross_entropy_sum;
pub use model::Model;
pub use module::Module;
pub use parallelize::{ParallelStyle, Parallelized, parallelize};
pub use parameter::Parameter;
pub use parameters_by_axes::parameters_by_axes;
pub use recompute::{RecomputeFn, is_recomputing, recompute};
pub use run::{Run, run};
pub use shards::Shards;
pub use sync_batch_norm::{SyncBatchNorm, convert_sync_batchnorm};
pub use tensor_parallel::{SequenceParallel, TensorParallel};
pub use thread_bound::ThreadBound;
pub use trainyard_nn_derive::Module;
pub use unit::{Context, Unit, UnitCall};
pub use unit_hooks::{Event, UnitHooks};
pub use vit::Vit;

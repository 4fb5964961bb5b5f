//! Trainyard: distributed training of one model on many nodes.
//!
//! Keep your model and your training loop; wrap the model in a parallelism strategy. This is distributed
//! data parallelism; `examples/ddp.rs` is a complete program:
//!
//! ```no_run
//! use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
//! use trainyard::{Builder, Context, DataParallelWrapper, Ddp, DdpOptions, GradSync};
//! use trainyard::{Model, Module, SimpleCnn, Strategy};
//!
//! fn main() -> trainyard::Result<()> {
//!     let world = trainyard::init()?; // the ranks that `trainyard run` or torchrun started
//!     let model = SimpleCnn::build(&Builder::new(1))?;
//!     let model = Ddp::new(model, &world.world_group()?, DdpOptions::default())?;
//!     let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());
//! #   let batches: Vec<trainyard::data::Batch> = Vec::new();
//!     for (step, batch) in (0..).zip(batches) {
//!         let run = model.forward(&batch.inputs, &Context::training(step))?;
//!         let loss = model.loss(run.output(), &batch.targets)? / batch.num_targets as f64;
//!         model.backward(run, &loss, GradSync::Full)?; // all-reduces gradients during backward
//!         optimizer.step(3e-4)?;
//!         model.zero_grad()?;
//!     }
//!     Ok(())
//! }
//! ```
//!
//! The items that most programs need are at the top level. The modules have the rest:
//!
//! - [`mesh`]: the device mesh: axes, ranks, groups, and sharded tensor layouts.
//! - [`arch`]: what a decoder is, and config.json of Hugging Face in both directions.
//! - [`nn`]: parameters, modules, layers, models, and wrappers for `tch` models.
//! - [`parallel`]: the strategies that wrap a model: DDP, FSDP (ZeRO), pipelines.
//! - [`cost`]: what strategies send and hold, by closed formulas.
//! - [`schedule`]: pipeline schedules.
//! - [`data`]: datasets, the distributed sampler, the data loader.
//! - [`optim`]: AdamW, SGD, LAMB, LARS, Lion and Muon, for full and for sharded parameters.
//! - [`train`]: learning rate schedules, checkpoints, metrics, and the training loop of a config.
//! - [`trace`]: the flight recorder of a rank.
//! - [`torch`]: process groups, autograd hooks, storages and kernels that `tch` lacks.
//! - [`config`]: the config file.
//!
//! - [`checkpoint`]: saving and loading a wrapped model and its optimizer.
//!
//! A program that only adds components, such as a model, an optimizer or a dataset, needs no loop: [`train_main`] runs
//! jobs of a config file with those of a [`Registry`].
//!
//! Custom models derive [`Module`] with [`macro@Module`].
//!
//! On a node with a GPU, ranks train on it, with NCCL; see the chapter on GPUs of the book.

mod init;
mod spawn;

pub use tch;
pub use trainyard_arch as arch;
pub use trainyard_config as config;
pub use trainyard_cost as cost;
pub use trainyard_data as data;
pub use trainyard_mesh as mesh;
pub use trainyard_nn as nn;
pub use trainyard_optim as optim;
pub use trainyard_parallel as parallel;
pub use trainyard_schedule as schedule;
pub use trainyard_torch as torch;
pub use trainyard_trace as trace;
pub use trainyard_train as train;
pub use trainyard_train::checkpoint;

pub use arch::DecoderConfig;
pub use config::Config;
pub use init::{init, init_along, init_mesh};
pub use mesh::{Axis, AxisSet, Mesh};
pub use nn::{
    Builder, Context, ContextParallel, ContextParallelMethod, Decoder, Init, Model, Module,
    ParallelStyle, Parameter, SequenceParallel, SimpleCnn, TensorParallel, Unit, UnitFn,
    VarStoreModel, convert_sync_batchnorm, cross_entropy_sum, parallelize,
};
pub use parallel::{
    BroadcastBuffers, Cut, DataParallel, DataParallelWrapper, Ddp, DdpOptions, FullyShard,
    GradSync, Join, Pipeline, PipelineOptions, Precision, ShardOptions, Strategy, WrapPolicy,
    fully_shard, pipeline,
};
pub use spawn::spawn;
pub use torch::{Device, Group, Kind, ReduceOp, Tensor, Work, World};
pub use trace::{Ledger, Purpose};
/// The error type of this library; `?` converts the errors of all its crates to it.
pub use train::TrainError as Error;
pub use train::{GradScaler, NoKeys, Registry};
/// The program of a training job: everything that `trainyard train`, `verify` and `dry-run` do, with the components of a
/// registry. A `main` returns what it returns.
pub use trainyard_engine::main as train_main;

/// The result type of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

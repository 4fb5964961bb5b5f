//! Trainyard: train one model on many machines. The library's face.
//!
//! Keep your model and your loop; wrap the model in the strategy that splits the work. This is data
//! parallelism with a model of one's own, as `examples/ddp.rs` has it in full:
//!
//! ```no_run
//! use trainyard::train::optimizer;
//! use trainyard::{Builder, Context, Ddp, DdpOptions, Model, Module, SimpleCnn, Strategy, Sync};
//!
//! fn main() -> trainyard::Result<()> {
//!     let world = trainyard::init()?; // the ranks that `trainyard run` or torchrun started
//!     let model = SimpleCnn::build(&Builder::new(1))?;
//!     let model = Ddp::new(model, &world.everyone()?, DdpOptions::default())?;
//!     let mut optimizer = optimizer::build(&Default::default(), model.parameters());
//! #   let batches: Vec<trainyard::data::Batch> = Vec::new();
//!     for (step, batch) in (0..).zip(batches) {
//!         let run = model.forward(&batch.inputs, &Context::training(step))?;
//!         let loss = model.loss(run.output(), &batch.targets)? / batch.num_targets as f64;
//!         model.backward(run, &loss, Sync::Reduce)?; // reduced while backward goes on
//!         optimizer.step(3e-4, None)?;
//!         model.zero_grad()?;
//!     }
//!     Ok(())
//! }
//! ```
//!
//! The names most programs need are here at the top. The rest is in the modules:
//!
//! - [`mesh`]: axes, ranks, groups, and which slice of a tensor a rank holds.
//! - [`nn`]: parameters, modules, layers, models, and how a `tch` model becomes one.
//! - [`parallel`]: the strategies that wrap a model.
//! - [`schedule`]: what the ranks of a pipeline do in which order.
//! - [`data`]: sources, the sampler, the loader.
//! - [`train`]: optimisers, schedules, metrics, and the whole loop from a config file.
//! - [`trace`]: the ledger of what a rank did.
//! - [`torch`]: process groups, autograd hooks, storages, kernels: what `tch` lacks.
//! - [`config`]: the config file.
//!
//! Models of one's own derive [`Module`]; [`macro@Module`] finds its way through this crate.
//!
//! With the feature `cuda` the backend NCCL is there beside Gloo.

mod init;

pub use tch;
pub use trainyard_config as config;
pub use trainyard_data as data;
pub use trainyard_mesh as mesh;
pub use trainyard_nn as nn;
pub use trainyard_parallel as parallel;
pub use trainyard_schedule as schedule;
pub use trainyard_torch as torch;
pub use trainyard_trace as trace;
pub use trainyard_train as train;

pub use config::Config;
pub use init::{init, init_along, init_mesh};
pub use mesh::{Axis, AxisSet, Mesh};
pub use nn::{
    Builder, Context, ContextParallel, Init, Llama, LlamaConfig, Method as ContextMethod, Model,
    Module, Parameter, Sequence, SimpleCnn, TensorParallel, Unit, UnitFn, VarStoreModel,
    cross_entropy_sum,
};
pub use parallel::{
    DataParallel, Ddp, DdpOptions, FullyShard, Precision, ShardOptions, Strategy, Sync,
};
pub use torch::{Device, Group, Kind, ReduceOp, Tensor, Work, World};
pub use trace::{Ledger, Purpose};
/// Any error of this library: whatever a program meets, `?` turns into this.
pub use train::TrainError as Error;

/// Result of a program that uses this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

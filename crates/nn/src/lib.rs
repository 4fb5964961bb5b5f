//! Models, told in the words every strategy uses.
//!
//! A [`Parameter`] has a global name, a global shape and a layout over the mesh. A [`Module`] is
//! whatever has parameters. A [`Model`] is a list of named [`Unit`]s, executed one after another
//! by [`run`], the only call site there is; a strategy is an [`Intercept`] at that call site, and
//! so models hold no parallel code.
//! What splits the layers themselves they are built with: [`TensorParallel`] and [`ContextParallel`].
//!
//! ```no_run
//! use trainyard_nn::{Builder, Context, Llama, LlamaConfig, Model, run};
//! # fn step(config: &LlamaConfig, inputs: &tch::Tensor, targets: &tch::Tensor) -> trainyard_nn::Result<()> {
//! let model = Llama::build(config, 128, &Builder::new(1))?;
//! let pass = run(&model, inputs, &Context::training(0), &[])?;
//! let loss = model.loss(pass.output(), targets)? / targets.numel() as f64;
//! pass.backward(&loss)?;
//! # Ok(())
//! # }
//! ```

// The derive names this crate by its public path, here too.
extern crate self as trainyard_nn;

mod adapter;
mod builder;
mod cnn;
mod context_parallel;
mod documents;
pub mod dtype;
mod error;
mod experts;
mod gpt2;
pub mod init;
mod intercept;
pub mod layers;
mod llama;
mod loss;
mod model;
mod module;
mod parameter;
mod recompute;
mod run;
mod tape;
mod tensor_parallel;
mod thread_bound;
mod traffic;
mod unit;
pub mod weight_gradients;
pub mod weights;

pub use adapter::{LossFn, UnitFn, VarStoreModel};
pub use builder::{Builder, Place};
pub use cnn::SimpleCnn;
pub use context_parallel::{ContextParallel, Method};
pub use documents::Documents;
pub use error::{NnError, Result};
pub use experts::{ExpertParallel, Load, MixtureOfExperts, MoeConfig, Router, Scoring, Spread};
pub use gpt2::{Gpt2, Gpt2Config};
pub use init::Init;
pub use intercept::{Event, Intercept};
pub use layers::RopeScaling;
pub use llama::{Llama, LlamaConfig};
pub use loss::cross_entropy_sum;
pub use model::Model;
pub use module::Module;
pub use parameter::Parameter;
pub use recompute::{Part, recomputed};
pub use run::{Run, run};
pub use tensor_parallel::{Sequence, TensorParallel};
pub use thread_bound::ThreadBound;
pub use trainyard_nn_derive::Module;
pub use unit::{Context, Unit, UnitCall};

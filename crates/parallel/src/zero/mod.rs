//! Sharded data parallelism: ZeRO's three stages and hybrid sharding, by one mechanism.
//!
//! The parameters of a unit lie in one row, of which every rank holds a chunk. Three things can be
//! done with a row: gather it, release it, and reduce its gradients to the chunks. The stages differ
//! only in when:
//!
//! | stage | gathered | released | gradients |
//! |---|---|---|---|
//! | [`Stage::OptimizerStates`] | once after each optimiser step | never | kept whole, reduced once a step |
//! | [`Stage::Gradients`] | once after each optimiser step | never | reduced as each unit ends backward |
//! | [`Stage::Parameters`] | before each unit's forward and backward | after each | the same |
//!
//! ```no_run
//! # use trainyard_parallel::{FullyShard, ShardOptions, Strategy, Sync};
//! # use trainyard_nn::{Context, Llama, Model};
//! # fn step(model: Llama, world: trainyard_torch::World, x: tch::Tensor, y: tch::Tensor) -> trainyard_parallel::Result<()> {
//! let model = FullyShard::new(model, &world, ShardOptions::default())?;
//! let run = model.forward(&x, &Context::training(0))?;
//! let loss = model.loss(run.output(), &y)? / y.numel() as f64;
//! model.backward(run, &loss, Sync::Reduce)?; // every rank now has its shard of the gradients
//! # Ok(())
//! # }
//! ```

mod at_units;
mod blank;
mod fully_shard;
mod kept;
mod offload;
mod owned;
mod pool;
mod row;
mod schedule;
mod shards;
mod shelf;
mod unit;
mod whole;

use std::rc::Rc;
use std::sync::{Mutex, MutexGuard};

use trainyard_mesh::{Axis, AxisSet, Layout};
use trainyard_nn::Intercept;
use trainyard_torch::ReduceOp;

use crate::precision::Precision;
use shards::Shards;

pub use fully_shard::FullyShard;
pub use row::Row;
pub use schedule::Reshard;
pub use shelf::OffloadOptions;
pub use whole::{part, whole};

/// What is sharded; each stage shards what those before it do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Stage 1: the optimiser's states, master weights among them.
    OptimizerStates,
    /// Stage 2: and gradients.
    Gradients,
    /// Stage 3: and parameters.
    #[default]
    Parameters,
}

/// How [`FullyShard`] works.
pub struct ShardOptions {
    /// What is sharded.
    pub stage: Stage,
    /// Number types.
    pub precision: Precision,
    /// `Mean` for losses that are means over a rank's own samples; `Sum` for losses that are already
    /// divided by the global count.
    pub op: ReduceOp,
    /// Whether parameters go after forward; stage 3 only.
    pub reshard_after_forward: Reshard,
    /// How many units are gathered ahead; stage 3 only.
    pub prefetch: usize,
    /// Whether communication runs beside computation. Results are the same to the bit.
    pub overlap: bool,
    /// Where parameters and the optimiser's states are kept while nobody computes with them; in
    /// memory if absent. Stage 3 only.
    pub offload: Option<OffloadOptions>,
    /// What else intercepts units, inside of gathering: recomputation, for one.
    pub inside: Vec<Rc<dyn Intercept>>,
}

impl Default for ShardOptions {
    fn default() -> Self {
        ShardOptions {
            stage: Stage::default(),
            precision: Precision::default(),
            op: ReduceOp::Mean,
            reshard_after_forward: Reshard::default(),
            prefetch: 1,
            overlap: true,
            offload: None,
            inside: Vec::new(),
        }
    }
}

/// The axes over which states are sharded: ranks along `cp` see other parts of the same sequences
/// but hold the same model, so they share its states too.
pub fn shard_axes() -> AxisSet {
    AxisSet::of([Axis::DpShard, Axis::Cp])
}

/// The axes over which a parameter's states are sharded: those of experts over the ranks that have the
/// same ones.
fn shard_axes_of(layout: &Layout) -> AxisSet {
    match layout.is_of_experts() {
        true => Axis::Efsdp.into(),
        false => shard_axes(),
    }
}

/// A panic inside a hook was reported as that hook's error.
fn lock(shards: &Mutex<Shards>) -> MutexGuard<'_, Shards> {
    shards
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

//! Checkpoints of a training loop of one's own: a wrapped model and its optimizer in a folder.

use std::path::Path;
use std::sync::Arc;

use tch::Tensor;
use trainyard_checkpoint::{Checkpoint, TrainState, step_dir, store};
use trainyard_optim::Optimizer;
use trainyard_parallel::Strategy;
use trainyard_torch::{ReduceOp, World};
use trainyard_trace::Purpose;

use super::load::{agree_on_load, load_model, load_param_states};
use super::resume::{ResumeSource, SearchRange, find_resume_source};
use super::save::{Destination, Saver};
use super::save_plan::Beside;
use crate::error::{Result, TrainError};

/// Saves a model and its optimizer after `step` steps as `folder/step-N`, sharded or not: every rank writes its shards.
/// This is a collective call. The checkpoint can be loaded on any other mesh.
///
/// ```no_run
/// # use trainyard_train::checkpoint;
/// # fn example(world: &trainyard_torch::World, model: &trainyard_parallel::Ddp<trainyard_nn::SimpleCnn>,
/// #     optimizer: &mut trainyard_optim::AdamW) -> trainyard_train::Result<()> {
/// let first = checkpoint::load("outputs/checkpoint", world, model, optimizer)?.unwrap_or(0);
/// for step in first..1000 {
///     // forward, backward, optimizer.step(..)
///     if (step + 1) % 100 == 0 {
///         checkpoint::save("outputs/checkpoint", world, model, optimizer, step + 1)?;
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub fn save(
    folder: impl AsRef<Path>,
    world: &World,
    model: &impl Strategy,
    optimizer: &impl Optimizer,
    step: u64,
) -> Result<()> {
    let destination = Destination {
        store: store::open(folder.as_ref())?,
        keep: 0,
        is_async: false,
        is_durable: true,
        owner: None,
    };
    let state = TrainState {
        step,
        samples_seen: 0,
        seed: 0,
        world_size: world.size(),
        config: String::new(),
        extra_state: serde_json::Value::Null,
    };
    let mut saver = Saver::new(world)?;
    let beside = Beside {
        states: &model.param_states()?,
        outer_group: None,
    };
    let saved = saver.save_model((model, optimizer), beside, world, state, &[destination]);
    // A rank knows only whether it has written its own shards, and rank 0 whether the checkpoint is complete.
    let has_failed = saved.is_err() || saver.has_failed(step);
    let failures = Tensor::from_slice(&[i64::from(has_failed)]);
    let group = world.world_group()?;
    group
        .all_reduce(&failures, ReduceOp::Max, Purpose::State)?
        .wait()?;
    saved?;
    match failures.f_int64_value(&[0])? {
        0 => Ok(()),
        _ => Err(TrainError::StepNotSaved { step }),
    }
}

/// Loads the newest checkpoint of a folder that all ranks can read into a model and its optimizer. Returns its step;
/// `None` if there is none. This is a collective call.
pub fn load(
    folder: impl AsRef<Path>,
    world: &World,
    model: &impl Strategy,
    optimizer: &mut impl Optimizer,
) -> Result<Option<u64>> {
    let store = store::open(folder.as_ref())?;
    let mut range = SearchRange::default();
    loop {
        let step = match find_resume_source(Some(&*store), None, range, world)? {
            ResumeSource::Storage(step) => step,
            _ if range.is_whole() => return Ok(None),
            _ => return Err(TrainError::NoWholeCheckpoint),
        };
        range.storage = step;
        let opened = Checkpoint::open(Arc::clone(&store), &step_dir(step));
        let loaded = opened.map_err(TrainError::from).and_then(|checkpoint| {
            load_model(&checkpoint, model, optimizer, world)?;
            let states = model.param_states()?;
            load_param_states(&checkpoint, &model.parameters(), &states, world)?;
            Ok(checkpoint)
        });
        if agree_on_load(loaded, world)?.is_some() {
            return Ok(Some(step));
        }
    }
}

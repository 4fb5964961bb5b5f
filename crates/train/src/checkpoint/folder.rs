//! Checkpoints of a training loop of one's own: a wrapped model and its optimizer in a folder.

use std::path::Path;

use trainyard_checkpoint::{Checkpoint, TrainState, store};
use trainyard_optim::Optimizer;
use trainyard_parallel::Strategy;
use trainyard_torch::World;

use super::load::{latest, load_model};
use super::save::{Destination, Saver};
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
    saver.save_model(model, optimizer, world, state, &[destination])?;
    // All ranks return only when the checkpoint is complete, or has failed.
    world.world_group()?.barrier()?.wait()?;
    if saver.has_failed(step) {
        return Err(TrainError::NotSaved { step });
    }
    Ok(())
}

/// Loads the newest complete checkpoint of a folder into a model and its optimizer. Returns its step; `None` if there is
/// none. This is a collective call.
pub fn load(
    folder: impl AsRef<Path>,
    world: &World,
    model: &impl Strategy,
    optimizer: &mut impl Optimizer,
) -> Result<Option<u64>> {
    let store = store::open(folder.as_ref())?;
    let Some(newest) = latest(&*store, world)? else {
        return Ok(None);
    };
    let checkpoint = Checkpoint::open(store, &newest)?;
    load_model(&checkpoint, &model.parameters(), optimizer, world)?;
    Ok(checkpoint.state().map(|state| state.step))
}

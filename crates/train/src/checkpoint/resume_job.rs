//! Brings a job to where it was: the newest whole checkpoint of the job, or else initial weights.

use std::sync::Arc;

use trainyard_checkpoint::{Checkpoint, TrainState, step_dir, store};
use trainyard_config::Config;
use trainyard_torch::World;

use super::destinations::stored_checkpoints;
use super::resume_changes::check;
use super::{
    Destination, ResumeSource, SearchRange, agree_on_load, find_resume_source, load_opened,
    load_step,
};
use crate::error::{Result, TrainError};
use crate::trainer::Trainer;

/// Loads model and optimizer state from the latest checkpoint, or else weights from `checkpoint.initial_load_path`.
pub(crate) fn resume(
    config: &Config,
    trainer: &mut Trainer,
    world: &World,
    memory: Option<&Destination>,
) -> Result<()> {
    if load_latest(config, trainer, world, memory)? {
        return Ok(());
    }
    let Some(path) = &config.checkpoint.initial_load_path else {
        return Ok(());
    };
    let loaded = load_step(store::open(path)?, ".", trainer, world)?;
    match loaded.state() {
        Some(state) => continue_at(state, &loaded, config, trainer, world)?,
        None if world.rank() == 0 => {
            tracing::info!("loaded initial weights from {}", loaded.path());
        }
        None => {}
    }
    Ok(())
}

/// Loads model and optimizer state from the latest checkpoint of the job. Whether there was one.
pub(crate) fn load_latest(
    config: &Config,
    trainer: &mut Trainer,
    world: &World,
    memory: Option<&Destination>,
) -> Result<bool> {
    let section = &config.checkpoint;
    let store = stored_checkpoints(config)?;
    let storage = (section.enable && section.resume).then_some(&*store);
    let memory = memory
        .filter(|_| section.resume)
        .map(|destination| &destination.store);
    let mut range = SearchRange::default();
    loop {
        let source = find_resume_source(storage, memory, range, world)?;
        let loaded = match source {
            ResumeSource::None if range.is_whole() => return Ok(false),
            ResumeSource::None => return Err(TrainError::NoWholeCheckpoint),
            ResumeSource::Storage(step) => {
                range.storage = step;
                load_step(Arc::clone(&store), &step_dir(step), trainer, world)
            }
            ResumeSource::PeerMemory(step, opened) => {
                range.memory = step;
                load_opened(opened, trainer, world)
            }
        };
        if let Some(loaded) = agree_on_load(loaded, world)? {
            if let Some(state) = loaded.state() {
                continue_at(state, &loaded, config, trainer, world)?;
            }
            return Ok(true);
        }
    }
}

/// Sets the counters of the trainer to those of a checkpoint, unless this job differs from the one that saved it.
fn continue_at(
    state: &TrainState,
    loaded: &Checkpoint,
    config: &Config,
    trainer: &mut Trainer,
    world: &World,
) -> Result<()> {
    let changes = check(config, world.size(), state)?;
    trainer.resume_at(state.step, state.samples_seen);
    trainer.load_extra_state(&state.extra_state);
    if world.rank() == 0 {
        tracing::info!("resumed from step {}: {}", state.step, loaded.path());
        for change in changes {
            tracing::warn!("{change}");
        }
        if state.step >= config.training.steps {
            tracing::warn!(
                "nothing is left to train: the checkpoint is of step {}, and training.steps is {}",
                state.step,
                config.training.steps
            );
        }
    }
    Ok(())
}

//! Which activations a job recomputes: as the config says, or as a memory budget allows.

use trainyard_config::{ActivationCheckpointMode, Config, SelectiveOption};
use trainyard_parallel::{Recompute, RecomputePlan, fit};
use trainyard_torch::World;

use crate::dry_run::peak_with;
use crate::error::{Result, TrainError};

/// The plan for a job. With a budget it follows one step of every plan it tries on tensors without
/// memory, so it is known beforehand what will be held.
pub fn plan(config: &Config, world: &World) -> Result<RecomputePlan> {
    let section = &config.activation_checkpoint;
    let num_units = num_units(config)?;
    let every = |k, what| RecomputePlan::every(k, what, num_units);
    Ok(match (section.mode, section.selective()?) {
        (ActivationCheckpointMode::None, _) => RecomputePlan::nothing(num_units),
        (ActivationCheckpointMode::Full, _) => every(1, Recompute::Everything),
        (ActivationCheckpointMode::Selective, SelectiveOption::Attention) => {
            every(1, Recompute::Attention)
        }
        (ActivationCheckpointMode::Selective, SelectiveOption::Every(k)) => {
            every(k, Recompute::Everything)
        }
        (ActivationCheckpointMode::MemoryBudget, _) => within_budget(config, num_units, world)?,
    })
}

fn within_budget(config: &Config, num_units: usize, world: &World) -> Result<RecomputePlan> {
    let budget = config.activation_checkpoint.memory_budget_bytes;
    let plans = RecomputePlan::from_fast_to_small(num_units);
    let found = fit(&plans, budget, |plan| {
        peak_with(config, world.mesh().clone(), plan)
    })?;
    match found {
        Ok(index) => {
            if world.rank() == 0 && !world.is_fake() {
                let (attention, all) = plans[index].counts();
                tracing::info!(
                    "memory budget of {budget} bytes: {attention} blocks recompute attention, \
                     {all} everything"
                );
            }
            Ok(plans[index].clone())
        }
        Err(peak) => Err(TrainError::OverBudget { budget, peak }),
    }
}

/// Units of the model a config describes.
fn num_units(config: &Config) -> Result<usize> {
    Ok(match config.model.resolve()?.decoder() {
        Some(sizes) => sizes.num_hidden_layers + 2,
        // It has no equal blocks to recompute.
        None => 1,
    })
}

//! Activation checkpointing: which activations a job recomputes, from the config or a memory budget.

use trainyard_config::{ActivationCheckpointMode, Config, SelectiveOption};
use trainyard_parallel::{Recompute, RecomputePlan, fit_to_budget};
use trainyard_torch::World;

use crate::dry_run::peak_with_plan;
use crate::error::{Result, TrainError};

/// The plan for a job. With a memory budget, candidate plans are tried in dry runs, so that the peak memory
/// is known before training starts.
pub fn plan(config: &Config, world: &World) -> Result<RecomputePlan> {
    let section = &config.activation_checkpoint;
    let num_units = num_units(config)?;
    let every = |k, what| RecomputePlan::every(k, what, num_units);
    Ok(match (section.mode, section.selective()?) {
        (ActivationCheckpointMode::None, _) => RecomputePlan::none(num_units),
        (ActivationCheckpointMode::Full, _) => every(1, Recompute::Full),
        (ActivationCheckpointMode::Selective, SelectiveOption::Attention) => {
            every(1, Recompute::Attention)
        }
        (ActivationCheckpointMode::Selective, SelectiveOption::Every(k)) => {
            every(k, Recompute::Full)
        }
        (ActivationCheckpointMode::MemoryBudget, _) => within_budget(config, num_units, world)?,
    })
}

fn within_budget(config: &Config, num_units: usize, world: &World) -> Result<RecomputePlan> {
    let budget = config.activation_checkpoint.memory_budget_bytes;
    let plans = RecomputePlan::candidates(num_units);
    let found = fit_to_budget(&plans, budget, |plan| {
        peak_with_plan(config, world.mesh().clone(), plan)
    })?;
    match found {
        Ok(index) => {
            if world.rank() == 0 && !world.is_fake() {
                let (attention, all) = plans[index].counts();
                tracing::info!(
                    "activation checkpointing within {budget} bytes: {attention} blocks recompute \
                     attention, {all} blocks recompute everything"
                );
            }
            Ok(plans[index].clone())
        }
        Err(peak) => Err(TrainError::OverBudget { budget, peak }),
    }
}

/// The number of units of the model.
fn num_units(config: &Config) -> Result<usize> {
    Ok(match config.model.resolve()?.decoder() {
        Some(sizes) => sizes.num_hidden_layers + 2,
        // The CNN has no repeated blocks to recompute.
        None => 1,
    })
}

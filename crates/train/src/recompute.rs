//! Activation checkpointing: which activations a job recomputes, from the config or a memory budget.

use trainyard_config::{ActivationCheckpointMode, SelectiveOption};
use trainyard_parallel::{Recompute, RecomputePlan, fit_to_budget};
use trainyard_torch::World;

use crate::build;
use crate::dry_run::peak_with_plan;
use crate::error::{Result, TrainError};
use crate::train_spec::TrainSpec;

/// The plan for a job. With a memory budget, candidate plans are tried in dry runs, so that the peak memory
/// is known before training starts.
pub fn plan(spec: &TrainSpec, world: &World) -> Result<RecomputePlan> {
    let section = &spec.activation_checkpoint;
    let num_units = num_units(spec)?;
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
        (ActivationCheckpointMode::MemoryBudget, _) => within_budget(spec, num_units, world)?,
    })
}

fn within_budget(spec: &TrainSpec, num_units: usize, world: &World) -> Result<RecomputePlan> {
    let budget = spec.activation_checkpoint.memory_budget_bytes;
    let plans = RecomputePlan::candidates(num_units);
    let found = fit_to_budget(&plans, budget, |plan| peak_with_plan(spec, world, plan))?;
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
fn num_units(spec: &TrainSpec) -> Result<usize> {
    Ok(match spec.model.resolve()?.num_units() {
        Some(number) => number,
        None => build::outline(spec)?.units().len(),
    })
}

//! Assignment of parameters to the units that shard them.

use trainyard_nn::{Model, Parameter};

use super::flat_param_handle::FlatParamHandle;
use crate::error::{ParallelError, Result};

/// The trainable parameters of every unit; a parameter that several units use is assigned to the first of them.
pub(super) fn assign_params(model: &dyn Model) -> Result<Vec<Vec<Parameter>>> {
    let mut seen: Vec<Parameter> = Vec::new();
    let mut assigned = Vec::new();
    for unit in model.units() {
        let mut members = Vec::new();
        unit.visit(&mut |parameter| {
            if parameter.is_trainable() && !seen.iter().any(|known| known.is(parameter)) {
                seen.push(parameter.clone());
                members.push(parameter.clone());
            }
        });
        assigned.push(members);
    }
    let mut unassigned = Vec::new();
    model.visit(&mut |parameter| {
        if parameter.is_trainable() && !seen.iter().any(|known| known.is(parameter)) {
            unassigned.push(parameter.name().to_owned());
        }
    });
    if unassigned.is_empty() {
        Ok(assigned)
    } else {
        Err(ParallelError::OutsideUnits { names: unassigned })
    }
}

/// Marks the units whose parameters other units use too.
pub(super) fn mark_shared(
    model: &dyn Model,
    assigned: &[Vec<Parameter>],
    units: &mut [Option<FlatParamHandle>],
) {
    for tied in model.units().iter().flat_map(|unit| unit.tied_parameters()) {
        let owner = assigned
            .iter()
            .position(|members| members.iter().any(|p| p.is(&tied)));
        if let Some(unit) = owner.and_then(|owner| units[owner].as_mut()) {
            unit.is_shared = true;
        }
    }
}

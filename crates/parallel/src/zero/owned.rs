//! Which unit owns which parameter.

use trainyard_nn::{Model, Parameter};

use super::unit::ShardedUnit;
use crate::error::{ParallelError, Result};

/// The trained parameters of every unit, each by the unit that owns it.
pub(super) fn owned_parameters(model: &dyn Model) -> Result<Vec<Vec<Parameter>>> {
    let mut seen: Vec<Parameter> = Vec::new();
    let mut owned = Vec::new();
    for unit in model.units() {
        let mut members = Vec::new();
        unit.visit(&mut |parameter| {
            if parameter.is_trainable() && !seen.iter().any(|known| known.is(parameter)) {
                seen.push(parameter.clone());
                members.push(parameter.clone());
            }
        });
        owned.push(members);
    }
    let mut homeless = Vec::new();
    model.visit(&mut |parameter| {
        if parameter.is_trainable() && !seen.iter().any(|known| known.is(parameter)) {
            homeless.push(parameter.name().to_owned());
        }
    });
    match homeless.is_empty() {
        true => Ok(owned),
        false => Err(ParallelError::OutsideUnits { names: homeless }),
    }
}

/// Notes which units lend parameters to others.
pub(super) fn mark_lent(
    model: &dyn Model,
    owned: &[Vec<Parameter>],
    units: &mut [Option<ShardedUnit>],
) {
    for borrowed in model.units().iter().flat_map(|unit| unit.borrowed()) {
        let owner = owned
            .iter()
            .position(|members| members.iter().any(|p| p.is(&borrowed)));
        if let Some(unit) = owner.and_then(|owner| units[owner].as_mut()) {
            unit.is_lent = true;
        }
    }
}

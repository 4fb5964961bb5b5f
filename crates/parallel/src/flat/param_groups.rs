//! Which parameters belong to which unit, in the order in which a model uses them.

use trainyard_nn::{Model, Parameter};

use crate::error::{ParallelError, Result};

/// The trainable parameters of every unit; a parameter that several units use belongs to the first of them.
pub(crate) fn params_of_units(model: &dyn Model) -> Result<Vec<Vec<Parameter>>> {
    let (of_units, rest) = by_unit(model);
    if rest.is_empty() {
        Ok(of_units)
    } else {
        let names = rest.iter().map(|p| p.name().to_owned()).collect();
        Err(ParallelError::OutsideUnits { names })
    }
}

/// The trainable parameters in the order in which forward first uses them.
pub(crate) fn in_order_of_use(model: &dyn Model) -> Vec<Parameter> {
    let (of_units, rest) = by_unit(model);
    of_units.into_iter().flatten().chain(rest).collect()
}

/// The trainable parameters of every unit, and those of no unit.
fn by_unit(model: &dyn Model) -> (Vec<Vec<Parameter>>, Vec<Parameter>) {
    let mut seen: Vec<Parameter> = Vec::new();
    let mut unseen = |parameter: &Parameter| {
        let is_new = parameter.is_trainable() && !seen.iter().any(|known| known.is(parameter));
        if is_new {
            seen.push(parameter.clone());
        }
        is_new.then(|| parameter.clone())
    };
    let mut of_units = Vec::new();
    for unit in model.units() {
        let mut members = Vec::new();
        unit.visit(&mut |parameter| members.extend(unseen(parameter)));
        of_units.push(members);
    }
    let mut rest = Vec::new();
    model.visit(&mut |parameter| rest.extend(unseen(parameter)));
    (of_units, rest)
}

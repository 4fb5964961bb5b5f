//! Which parameters belong together: the order in which a model uses them, and units merged up to a size.

use std::ops::Range;

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

/// Merges consecutive units into groups of at most `limit` bytes each; a larger unit is a group of its own. Without a
/// limit, every unit is.
pub(crate) fn merge_units(bytes: &[u64], limit: Option<u64>) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut size = 0;
    for (unit, &bytes) in bytes.iter().enumerate() {
        match groups.last_mut() {
            Some(group) if limit.is_some_and(|limit| size + bytes <= limit) => {
                group.end = unit + 1;
                size += bytes;
            }
            _ => {
                groups.push(unit..unit + 1);
                size = bytes;
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn merged_units_are_consecutive_and_within_the_limit(
            bytes in prop::collection::vec(0u64..100, 0..40),
            limit in prop::option::of(1u64..300),
        ) {
            let groups = merge_units(&bytes, limit);
            prop_assert!(groups.iter().cloned().flatten().eq(0..bytes.len()));
            for group in groups {
                let total: u64 = bytes[group.clone()].iter().sum();
                prop_assert!(group.len() == 1 || limit.is_some_and(|limit| total <= limit));
            }
        }
    }
}

//! Parameters grouped by the mesh axes that something happens over.

use trainyard_mesh::AxisSet;

use crate::Parameter;

/// The parameters with the same axes, in the order in which each set of axes comes first.
pub fn parameters_by_axes(
    parameters: &[Parameter],
    axes_of: impl Fn(&Parameter) -> AxisSet,
) -> Vec<(AxisSet, Vec<Parameter>)> {
    let mut groups: Vec<(AxisSet, Vec<Parameter>)> = Vec::new();
    for parameter in parameters {
        let axes = axes_of(parameter);
        match groups.iter_mut().find(|(known, _)| *known == axes) {
            Some((_, members)) => members.push(parameter.clone()),
            None => groups.push((axes, vec![parameter.clone()])),
        }
    }
    groups
}

//! Replica digests: whether ranks that hold the same parameters and optimizer states hold the same bits.
//!
//! Replicas take the same steps, so they are equal in every bit until memory, a device or a network corrupts one of
//! them. A digest of a tensor is the sum of its elements' bits as integers, which every single flipped bit changes, and
//! which the device computes. Ranks compare digests, not tensors.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{Parameter, parameters_by_axes};
use trainyard_torch::{Group, World};

use crate::agreement::{gather, outliers};
use crate::{Result, TrainError};

/// Ranks whose replicas differ from those of other ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drift {
    /// The ranks that differ from the majority of their replicas; all of them if there is no majority.
    pub ranks: Vec<usize>,
    /// The tensors of this rank's replicas that differ; empty if only other ranks' replicas do.
    pub tensors: Vec<String>,
}

/// The parameters that are replicated over the same ranks.
struct ReplicaGroup {
    parameters: Vec<Parameter>,
    group: Group,
}

/// Compares the replicas of a job.
pub(crate) struct ReplicaDigests {
    groups: Vec<ReplicaGroup>,
    world: Group,
}

impl ReplicaDigests {
    /// Groups these parameters, whose layouts must be final.
    pub(crate) fn new(parameters: &[Parameter], world: &World) -> Result<ReplicaDigests> {
        let mut groups = Vec::new();
        // Replicas along `dp_outer` take steps of their own.
        let own = |axis: &Axis| *axis != Axis::DpOuter;
        let axes_of = |p: &Parameter| AxisSet::of(p.layout().replicated_axes().iter().filter(own));
        for (axes, parameters) in parameters_by_axes(parameters, axes_of) {
            let group = world.group(axes)?;
            if group.size() > 1 {
                groups.push(ReplicaGroup { parameters, group });
            }
        }
        Ok(ReplicaDigests {
            groups,
            world: world.world_group()?,
        })
    }

    /// Compares the parameters, and these optimizer states, named `kind.<parameter>`, with their replicas. Waits for
    /// the device. This is a collective call; the ranks of the result are the same everywhere.
    pub(crate) fn compare(&self, states: &[(String, Tensor)]) -> Result<Option<Drift>> {
        let mut tensors = Vec::new();
        let mut differs = false;
        for group in &self.groups {
            let found = group.compare(states)?;
            differs |= found.differs;
            tensors.extend(found.tensors);
        }
        let flags = gather(&self.world, &[i64::from(differs)])?;
        let ranks: Vec<usize> = (0..flags.len()).filter(|&rank| flags[rank] != 0).collect();
        Ok((!ranks.is_empty()).then_some(Drift { ranks, tensors }))
    }
}

/// What a rank finds in one of its groups.
struct Found {
    /// Whether this rank differs from the majority.
    differs: bool,
    /// The tensors that are not equal on all ranks of the group.
    tensors: Vec<String>,
}

impl ReplicaGroup {
    fn compare(&self, states: &[(String, Tensor)]) -> Result<Found> {
        let members = self.members(states);
        let digests = digests(members.values())?;
        let total = digests.iter().fold(0i64, |sum, d| sum.wrapping_add(*d));
        let totals = gather(&self.group, &[total])?;
        let is_own = |rank: &usize| *rank == self.group.index();
        let mut tensors = Vec::new();
        let outliers = outliers(&totals);
        if !outliers.is_empty() {
            let all = gather(&self.group, &digests)?;
            let rows: Vec<&[i64]> = all.chunks_exact(digests.len().max(1)).collect();
            for (index, name) in members.keys().enumerate() {
                if rows.iter().any(|row| row[index] != rows[0][index]) {
                    tensors.push(name.clone());
                }
            }
        }
        Ok(Found {
            differs: outliers.iter().any(is_own),
            tensors,
        })
    }

    /// The parameters of the group and their states, by name.
    fn members(&self, states: &[(String, Tensor)]) -> BTreeMap<String, Tensor> {
        let mut members = BTreeMap::new();
        for parameter in &self.parameters {
            let name = parameter.name().to_owned();
            members.insert(name, parameter.tensor().shallow_clone());
        }
        for (name, state) in states {
            let parameter = name.split_once('.').map(|(_, parameter)| parameter);
            if parameter.is_some_and(|parameter| members.contains_key(parameter)) {
                members.insert(name.clone(), state.shallow_clone());
            }
        }
        members
    }
}

/// The digests of tensors: the host reads all of them at once.
fn digests<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> Result<Vec<i64>> {
    let digests = tensors.map(digest).collect::<Result<Vec<_>>>()?;
    if digests.is_empty() {
        return Ok(Vec::new());
    }
    Ok(Vec::<i64>::try_from(Tensor::f_stack(&digests, 0)?)?)
}

/// The sum of the bits of all elements, as a scalar on the device. It wraps around.
fn digest(tensor: &Tensor) -> Result<Tensor> {
    let bits = match tensor.kind() {
        Kind::Double | Kind::Int64 => Kind::Int64,
        Kind::Float | Kind::Int => Kind::Int,
        Kind::BFloat16 | Kind::Half | Kind::Int16 => Kind::Int16,
        kind => {
            return Err(TrainError::StateKind {
                name: "a replica".into(),
                kind,
            });
        }
    };
    Ok(tch::no_grad(|| {
        tensor.f_detach()?.f_view_dtype(bits)?.f_sum(Kind::Int64)
    })?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_flipped_bit_changes_the_digest(
            values in prop::collection::vec(any::<f32>(), 1..50),
            index: prop::sample::Index,
            bit in 0u32..32,
        ) {
            let before = digest(&Tensor::from_slice(&values)).unwrap();
            let mut flipped = values.clone();
            let at = index.index(values.len());
            flipped[at] = f32::from_bits(flipped[at].to_bits() ^ (1 << bit));
            let after = digest(&Tensor::from_slice(&flipped)).unwrap();
            prop_assert!(!before.equal(&after));
        }
    }
}

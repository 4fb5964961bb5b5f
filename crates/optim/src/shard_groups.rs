//! The ranks that hold the other shards of parameters.

use tch::Tensor;
use trainyard_nn::{Parameter, parameters_by_axes};
use trainyard_torch::{Group, ReduceOp, World};
use trainyard_trace::Purpose;

use crate::Result;

/// Which parameters are sharded, and over which ranks.
pub(crate) struct ShardGroups(Vec<ShardGroup>);

/// Parameters that the same ranks hold the shards of.
struct ShardGroup {
    group: Group,
    /// Their indices in the list of all parameters.
    members: Vec<usize>,
}

impl ShardGroups {
    /// Of these parameters, whose layouts must be final.
    pub(crate) fn new(parameters: &[Parameter], world: &World) -> Result<ShardGroups> {
        let by_axes = parameters_by_axes(parameters, |parameter| parameter.layout().sharded_axes());
        let mut groups = Vec::new();
        for (axes, sharded) in by_axes {
            let group = world.group(axes)?;
            if group.size() > 1 {
                let is_member = |index: &usize| {
                    let parameter = &parameters[*index];
                    sharded.iter().any(|member| member.is(parameter))
                };
                let members = (0..parameters.len()).filter(is_member).collect();
                groups.push(ShardGroup { group, members });
            }
        }
        Ok(ShardGroups(groups))
    }

    /// Norms of full tensors from those of this rank's shards: `norms` are lists with one number per parameter. One
    /// all-reduce per group, whatever the number of lists.
    pub(crate) fn full_norms<const N: usize>(
        &self,
        mut norms: [Vec<Tensor>; N],
    ) -> Result<[Vec<Tensor>; N]> {
        for ShardGroup { group, members } in &self.0 {
            let of_list = |list: &Vec<Tensor>| -> Result<Tensor> {
                let own: Vec<&Tensor> = members.iter().map(|&index| &list[index]).collect();
                Ok(Tensor::f_stack(&own, 0)?)
            };
            let own = norms.iter().map(of_list).collect::<Result<Vec<_>>>()?;
            let squares = Tensor::f_stack(&own, 0)?.f_square()?;
            group
                .on_caller()
                .all_reduce(&squares, ReduceOp::Sum, Purpose::Control)?
                .wait()?;
            let lists = squares.f_sqrt()?.f_unbind(0)?;
            for (list, reduced) in norms.iter_mut().zip(lists) {
                for (&index, norm) in members.iter().zip(reduced.f_unbind(0)?) {
                    list[index] = norm;
                }
            }
        }
        Ok(norms)
    }
}

//! A sharded tensor made whole again, to be compared or saved, and a whole one cut as it was.

use tch::Tensor;
use trainyard_mesh::{Layout, Slice, slice_of};
use trainyard_nn::Parameter;
use trainyard_torch::{ReduceOp, TorchError, World};
use trainyard_trace::Purpose;

use super::blank::blank;
use crate::error::Result;

/// The whole of `held`, which is laid out as `parameter` is: the parameter itself, its gradient, or a
/// state of the optimiser. Every rank must ask, and every rank gets it.
///
/// Each rank puts its part into zeros and the parts are summed: more bytes than a gather, but right
/// for any layout.
pub fn whole(parameter: &Parameter, held: &Tensor, world: &World) -> Result<Tensor> {
    let layout: Layout = parameter.layout();
    let axes = layout.cut_axes();
    let group = world.group(axes)?;
    let shape: Vec<i64> = parameter.shape().iter().map(|&d| d as i64).collect();
    let held = held.f_detach()?;
    if group.size() == 1 {
        return Ok(held.f_view(&shape[..])?.copy());
    }
    let slice = slice_of(parameter.shape(), &layout, world.mesh(), world.rank())
        .map_err(|e| TorchError::Invalid(e.to_string()))?;
    let length = parameter.num_elements() as usize;
    let all = blank(&held, length, held.kind())?;
    let mut target = region(&all.f_view(&shape[..])?, &slice)?;
    match slice.flat {
        None => target.f_copy_(&held)?,
        Some(part) => {
            // An interval of the box's elements, which need not lie next to each other in the whole.
            let inside = blank(&held, slice.region.num_elements(), held.kind())?;
            let mut place = inside.f_narrow(0, part.start as i64, part.len() as i64)?;
            place.f_copy_(&held.f_view(-1i64)?)?;
            target.f_copy_(&inside.f_view(&target.size()[..])?)?
        }
    };
    group
        .all_reduce(&all, ReduceOp::Sum, Purpose::State)?
        .wait()?;
    Ok(all.f_view(&shape[..])?)
}

/// This rank's part of `all`, which is laid out as `parameter` would be on one rank.
pub fn part(parameter: &Parameter, all: &Tensor, world: &World) -> Result<Tensor> {
    let layout = parameter.layout();
    let slice = slice_of(parameter.shape(), &layout, world.mesh(), world.rank())
        .map_err(|e| TorchError::Invalid(e.to_string()))?;
    let held = region(&all.f_detach()?, &slice)?;
    Ok(match slice.flat {
        Some(flat) => held
            .f_reshape(-1i64)?
            .f_narrow(0, flat.start as i64, flat.len() as i64)?,
        None => held,
    })
}

/// The box of a tensor that a slice lies in.
fn region(tensor: &Tensor, slice: &Slice) -> Result<Tensor> {
    let mut region = tensor.shallow_clone();
    let lengths = std::iter::zip(&slice.region.offsets, &slice.region.lengths);
    for (dim, (&start, &length)) in lengths.enumerate() {
        region = region.f_narrow(dim as i64, start as i64, length as i64)?;
    }
    Ok(region)
}

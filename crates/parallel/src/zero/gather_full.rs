//! Conversion between sharded and full tensors, for comparison and saving.

use tch::Tensor;
use trainyard_mesh::{Layout, Slice, slice_of};
use trainyard_nn::Parameter;
use trainyard_torch::{ReduceOp, TorchError, World};
use trainyard_trace::Purpose;

use super::flat_tensor::zeros_flat;
use crate::error::Result;

/// Gathers the full tensor of `local`, which has the layout of `parameter`: the parameter itself, its gradient, or
/// an optimizer state. All ranks must call this, and every rank gets the result.
///
/// Each rank writes its shard into zeros, and the results are summed. That sends more bytes than an all-gather, but
/// works for every layout.
pub fn gather_full(parameter: &Parameter, local: &Tensor, world: &World) -> Result<Tensor> {
    let layout: Layout = parameter.layout();
    let axes = layout.sharded_axes();
    let group = world.group(axes)?;
    let shape: Vec<i64> = parameter.shape().iter().map(|&d| d as i64).collect();
    let local = local.f_detach()?;
    if group.size() == 1 {
        return Ok(local.f_view(&shape[..])?.copy());
    }
    let slice = slice_of(parameter.shape(), &layout, world.mesh(), world.rank())
        .map_err(|e| TorchError::Invalid(e.to_string()))?;
    let length = parameter.num_elements() as usize;
    let full = zeros_flat(&local, length, local.kind())?;
    let mut target = region(&full.f_view(&shape[..])?, &slice)?;
    match slice.flat {
        None => target.f_copy_(&local)?,
        Some(interval) => {
            // The interval is contiguous in the region, but not necessarily in the full tensor.
            let inner = zeros_flat(&local, slice.region.num_elements(), local.kind())?;
            let mut view = inner.f_narrow(0, interval.start as i64, interval.len() as i64)?;
            view.f_copy_(&local.f_view(-1i64)?)?;
            target.f_copy_(&inner.f_view(&target.size()[..])?)?
        }
    };
    group
        .all_reduce(&full, ReduceOp::Sum, Purpose::State)?
        .wait()?;
    Ok(full.f_view(&shape[..])?)
}

/// This rank's shard of `full`, a full tensor with the shape of `parameter`.
pub fn local_shard(parameter: &Parameter, full: &Tensor, world: &World) -> Result<Tensor> {
    let layout = parameter.layout();
    let slice = slice_of(parameter.shape(), &layout, world.mesh(), world.rank())
        .map_err(|e| TorchError::Invalid(e.to_string()))?;
    let local = region(&full.f_detach()?, &slice)?;
    Ok(match slice.flat {
        Some(flat) => local
            .f_reshape(-1i64)?
            .f_narrow(0, flat.start as i64, flat.len() as i64)?,
        None => local,
    })
}

/// The region of a tensor that a slice lies in.
fn region(tensor: &Tensor, slice: &Slice) -> Result<Tensor> {
    let mut region = tensor.shallow_clone();
    let lengths = std::iter::zip(&slice.region.offsets, &slice.region.lengths);
    for (dim, (&start, &length)) in lengths.enumerate() {
        region = region.f_narrow(dim as i64, start as i64, length as i64)?;
    }
    Ok(region)
}

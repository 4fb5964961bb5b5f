//! The shards of a parameter: where this rank's shard lies in the full tensor, and which ranks hold the others.

use tch::Tensor;
use trainyard_mesh::{Axis, AxisSet, Dim, Placement, Slice, slice_of};
use trainyard_torch::{Group, ReduceOp, TorchError, World, meta};
use trainyard_trace::Purpose;

use crate::{Parameter, Result};

/// The shards of a parameter, and of everything with its layout: its gradient, and its optimizer states.
pub struct Shards {
    /// The shape of the full tensor.
    shape: Vec<usize>,
    /// The shard of this rank.
    slice: Slice,
    group: Group,
}

impl Shards {
    /// The shards of `parameter`, whose layout must be final.
    pub fn of(parameter: &Parameter, world: &World) -> Result<Shards> {
        let layout = parameter.layout();
        let slice = slice_of(parameter.shape(), &layout, world.mesh(), world.rank())
            .map_err(|e| TorchError::Invalid(e.to_string()))?;
        Ok(Shards {
            shape: parameter.shape().to_vec(),
            slice,
            group: world.group(layout.sharded_axes())?,
        })
    }

    /// The shards of the matrices that this rank has parts of. A stack of matrices that is sharded by whole ones, as that of
    /// experts, is for this rank a stack of its own ones.
    pub fn of_matrices(parameter: &Parameter, world: &World) -> Result<Shards> {
        let mut shards = Shards::of(parameter, world)?;
        if shards.shape.len() > 2 {
            let layout = parameter.layout();
            let cuts_matrices = |axis: &Axis| layout.get(*axis) != Placement::Shard(Dim(0));
            let axes = layout.sharded_axes().iter().filter(cuts_matrices);
            shards.group = world.group(axes.collect::<AxisSet>())?;
            shards.shape[0] = shards.slice.region.lengths[0];
            shards.slice.region.offsets[0] = 0;
        }
        Ok(shards)
    }

    /// The shape of the full tensor.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Gathers the full tensor from every rank's shard `local`. All ranks must call this, and every rank gets the result. It
    /// shares the memory of `local` if no other rank has a shard.
    ///
    /// Each rank writes its shard into zeros, and the results are summed. That sends more bytes than an all-gather, but
    /// works for every layout.
    pub fn gather(&self, local: &Tensor) -> Result<Tensor> {
        let shape: Vec<i64> = self.shape.iter().map(|&length| length as i64).collect();
        let local = local.f_detach()?;
        if self.group.size() == 1 {
            return Ok(local.f_view(&shape[..])?);
        }
        let full = meta::new_zeros(&local, &shape)?;
        let mut target = self.region(&full)?;
        match &self.slice.flat {
            None => target.f_copy_(&local)?,
            Some(interval) => {
                // The interval is contiguous in the region, but not necessarily in the full tensor.
                let length = self.slice.region.num_elements() as i64;
                let inner = meta::new_zeros(&local, &[length])?;
                let mut view = inner.f_narrow(0, interval.start as i64, interval.len() as i64)?;
                view.f_copy_(&local.f_view(-1i64)?)?;
                target.f_copy_(&inner.f_view(&target.size()[..])?)?
            }
        };
        self.group
            .all_reduce(&full, ReduceOp::Sum, Purpose::State)?
            .wait()?;
        Ok(full)
    }

    /// This rank's shard of `full`.
    pub fn own(&self, full: &Tensor) -> Result<Tensor> {
        let local = self.region(&full.f_detach()?)?;
        Ok(match &self.slice.flat {
            Some(flat) => {
                let (start, length) = (flat.start as i64, flat.len() as i64);
                local.f_reshape(-1i64)?.f_narrow(0, start, length)?
            }
            None => local,
        })
    }

    /// The region of a full tensor that the shard lies in.
    fn region(&self, full: &Tensor) -> Result<Tensor> {
        let mut region = full.shallow_clone();
        let lengths = std::iter::zip(&self.slice.region.offsets, &self.slice.region.lengths);
        for (dim, (&start, &length)) in lengths.enumerate() {
            region = region.f_narrow(dim as i64, start as i64, length as i64)?;
        }
        Ok(region)
    }
}

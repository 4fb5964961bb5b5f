//! Buffers that forward updates, such as the running statistics of BatchNorm: all ranks compute with those of rank 0.
//!
//! Each rank updates them from its own part of the batch, so that they would drift apart. As with PyTorch's
//! `broadcast_buffers`, a forward pass that follows a step begins with a broadcast, one collective per dtype; passes of gradient
//! accumulation in between do not broadcast. Whoever compares or saves replicas broadcasts before.

use std::cell::Cell;

use tch::Tensor;
use trainyard_cost::{Volume, broadcast_volume};
use trainyard_nn::{Model, Parameter};
use trainyard_torch::autograd::without_version_bump;
use trainyard_torch::{Group, memory};
use trainyard_trace::{MemoryKind, Purpose};

use crate::error::Result;

/// Which buffers are broadcast before a forward pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BroadcastBuffers {
    /// Whether any are.
    pub enable: bool,
    /// Names of buffers that each rank keeps for itself.
    pub ignored: Vec<String>,
}

impl Default for BroadcastBuffers {
    fn default() -> Self {
        BroadcastBuffers {
            enable: true,
            ignored: Vec::new(),
        }
    }
}

impl BroadcastBuffers {
    fn includes(&self, buffer: &Parameter) -> bool {
        let is_ignored = self.ignored.iter().any(|name| name == buffer.name());
        self.enable && buffer.is_running_stat() && !is_ignored
    }
}

/// The buffers of a model that all ranks of a group share.
pub(crate) struct SharedBuffers {
    /// None if there are no buffers or no other ranks.
    group: Option<Group>,
    /// By dtype.
    tensors: Vec<Vec<Tensor>>,
    /// Whether they may have changed on this rank since the last broadcast.
    is_stale: Cell<bool>,
}

impl SharedBuffers {
    /// The running statistics of `model`, the same on all ranks of `group`, which is called only if there are any.
    pub(crate) fn of(
        model: &dyn Model,
        options: &BroadcastBuffers,
        group: impl FnOnce() -> trainyard_torch::Result<Group>,
    ) -> Result<SharedBuffers> {
        let mut tensors: Vec<Vec<Tensor>> = Vec::new();
        for buffer in model.parameters().iter().filter(|p| options.includes(p)) {
            let tensor = buffer.tensor().shallow_clone();
            let is_same = |of_kind: &&mut Vec<Tensor>| of_kind[0].kind() == tensor.kind();
            match tensors.iter_mut().find(is_same) {
                Some(of_kind) => of_kind.push(tensor),
                None => tensors.push(vec![tensor]),
            }
        }
        let group = if tensors.is_empty() {
            None
        } else {
            Some(group()?).filter(|group| group.size() > 1)
        };
        Ok(SharedBuffers {
            group,
            tensors,
            is_stale: Cell::new(false),
        })
    }

    /// Gives all ranks the buffers of rank 0, if a step has ended since the last time.
    pub(crate) fn broadcast_if_stale(&self) -> Result<()> {
        match &self.group {
            Some(group) if self.is_stale.replace(false) => self
                .tensors
                .iter()
                .try_for_each(|of_kind| broadcast_coalesced(group, of_kind)),
            _ => Ok(()),
        }
    }

    /// Makes the next pass broadcast, because it begins a step.
    pub(crate) fn end_step(&self) {
        self.is_stale.set(true);
    }

    /// The bytes of a step, in all groups of the world.
    pub(crate) fn volume(&self, world_size: usize) -> Volume {
        let num_ranks = self.group.as_ref().map_or(1, Group::size);
        let bytes = |t: &Tensor| (t.numel() * t.kind().elt_size_in_bytes()) as u64;
        let total: u64 = self.tensors.iter().flatten().map(bytes).sum();
        broadcast_volume(total, num_ranks).times(world_size / num_ranks)
    }
}

/// Broadcasts tensors of one dtype from rank 0, in one flat tensor.
///
/// An earlier forward may have saved them for a backward that is still to come. It does not read them, because it has
/// normalized by its own batch, so their versions stay.
fn broadcast_coalesced(group: &Group, tensors: &[Tensor]) -> Result<()> {
    let flat = tensors.iter().map(|t| t.f_detach()?.f_reshape(-1i64));
    let flat = flat.collect::<Result<Vec<_>, _>>()?;
    let joined = memory::scope(MemoryKind::Communication, || Tensor::f_cat(&flat, 0))?;
    group.broadcast(&joined, 0, Purpose::Parameter)?.wait()?;
    let lengths: Vec<i64> = flat.iter().map(|part| part.numel() as i64).collect();
    let received = joined.f_split_with_sizes(&lengths[..], 0)?;
    for (tensor, values) in tensors.iter().zip(&received) {
        let values = values.f_view_as(tensor)?;
        without_version_bump(tensor, || tensor.shallow_clone().f_copy_(&values))??;
    }
    Ok(())
}

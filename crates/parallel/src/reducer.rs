//! Bucketed gradient reduction of DDP.

use std::collections::BTreeSet;
use std::sync::Arc;

use tch::{Kind, Tensor};
use trainyard_nn::Parameter;
use trainyard_torch::{Group, ReduceOp, Result, TorchError, autograd, memory, meta, storage};
use trainyard_trace::{MemoryKind, Purpose};

use crate::bucket::{BucketLimits, assign_buckets};
use crate::compress::{GradientHook, Reduction};

/// The buckets of a model, and their progress in the current backward pass.
pub(crate) struct Reducer {
    group: Group,
    op: ReduceOp,
    hook: Arc<dyn GradientHook>,
    overlap: bool,
    slots: Vec<Slot>,
    buckets: Vec<Bucket>,
    /// Reductions in flight, in the order of the buckets, in which all ranks start them.
    in_flight: Vec<Box<dyn Reduction>>,
    /// Whether this pass reduces gradients, or only accumulates them.
    reducing: bool,
    /// Parameters without a gradient in the current reduction.
    unused: Vec<String>,
}

/// A parameter and its view of the bucket.
struct Slot {
    name: String,
    leaf: Tensor,
    view: Tensor,
    bucket: usize,
    ready: bool,
}

struct Bucket {
    buffer: Tensor,
    slots: Vec<usize>,
    num_missing: usize,
}

/// Configuration of a reducer.
#[derive(Clone)]
pub(crate) struct ReducerConfig {
    pub op: ReduceOp,
    pub hook: Arc<dyn GradientHook>,
    pub overlap: bool,
    pub limits: BucketLimits,
}

impl Reducer {
    /// `parameters` must be in order of use; backward completes their gradients in reverse order.
    pub(crate) fn new(
        parameters: &[Parameter],
        group: &Group,
        plan: ReducerConfig,
    ) -> Result<Reducer> {
        let leaves: Vec<&Parameter> = parameters.iter().rev().collect();
        let sizes: Vec<(Kind, u64)> = leaves
            .iter()
            .map(|p| (p.kind(), bytes(p.tensor())))
            .collect();
        let mut slots: Vec<Slot> = Vec::with_capacity(leaves.len());
        let mut order = vec![0; leaves.len()];
        let mut buckets = Vec::new();
        let limits = plan
            .limits
            .for_total(sizes.iter().map(|(_, bytes)| bytes).sum());
        for members in assign_buckets(&sizes, limits) {
            let tensors: Vec<&Tensor> = members.iter().map(|&i| leaves[i].tensor()).collect();
            let (buffer, views) = flat_buffer(&tensors)?;
            for (&member, view) in members.iter().zip(views) {
                order[member] = slots.len();
                slots.push(Slot {
                    name: leaves[member].name().to_owned(),
                    leaf: leaves[member].tensor().shallow_clone(),
                    view,
                    bucket: buckets.len(),
                    ready: false,
                });
            }
            let slots = members
                .iter()
                .map(|&member| order[member])
                .collect::<Vec<_>>();
            buckets.push(Bucket {
                buffer,
                num_missing: slots.len(),
                slots,
            });
        }
        Ok(Reducer {
            group: group.clone(),
            op: plan.op,
            hook: plan.hook,
            overlap: plan.overlap,
            slots,
            buckets,
            in_flight: Vec::new(),
            reducing: false,
            unused: Vec::new(),
        })
    }

    /// Every leaf, with the index that identifies it in [`Reducer::ready`].
    pub(crate) fn leaves(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        self.slots.iter().map(|slot| &slot.leaf).enumerate()
    }

    /// Broadcasts the parameters of rank 0, bucket by bucket.
    pub(crate) fn broadcast_parameters(&self) -> Result<()> {
        for bucket in &self.buckets {
            for &slot in &bucket.slots {
                let slot = &self.slots[slot];
                tch::no_grad(|| slot.view.shallow_clone().f_copy_(&slot.leaf))?;
            }
            self.group
                .broadcast(&bucket.buffer, 0, Purpose::Parameter)?
                .wait()?;
            for &slot in &bucket.slots {
                let slot = &self.slots[slot];
                tch::no_grad(|| slot.leaf.shallow_clone().f_copy_(&slot.view))?;
            }
        }
        Ok(())
    }

    /// Begins a backward pass.
    pub(crate) fn begin(&mut self, reducing: bool) -> Result<()> {
        // A pass that failed may have left reductions in flight, which are not part of this pass.
        for reduction in std::mem::take(&mut self.in_flight) {
            reduction.finish()?;
        }
        self.reducing = reducing;
        for slot in &mut self.slots {
            slot.ready = false;
        }
        for bucket in &mut self.buckets {
            bucket.num_missing = bucket.slots.len();
        }
        Ok(())
    }

    /// Moves an accumulated gradient into its bucket, and starts the reduction of the bucket when it is full.
    pub(crate) fn ready(&mut self, number: usize) -> Result<()> {
        let slot = &mut self.slots[number];
        move_into(&slot.leaf, &slot.view)?;
        if slot.ready {
            return Ok(());
        }
        slot.ready = true;
        self.buckets[slot.bucket].num_missing -= 1;
        if self.reducing && self.overlap {
            self.start_full_buckets()?;
        }
        Ok(())
    }

    /// Starts the reduction of every full bucket whose predecessors have started.
    fn start_full_buckets(&mut self) -> Result<()> {
        while let Some(bucket) = self.buckets.get(self.in_flight.len())
            && bucket.num_missing == 0
        {
            let reduction = self.hook.reduce(&self.group, &bucket.buffer, self.op)?;
            self.in_flight.push(reduction);
        }
        Ok(())
    }

    /// Names of parameters without a gradient, neither of this pass nor accumulated before.
    pub(crate) fn unused(&self) -> Vec<String> {
        let missing = self
            .slots
            .iter()
            .filter(|s| !s.ready && !s.leaf.grad().defined());
        missing.map(|s| s.name.clone()).collect()
    }

    /// Ends a reducing pass: starts the remaining buckets, with zeros for the parameters in `unused`.
    pub(crate) fn flush_buckets(&mut self, unused: Vec<String>) -> Result<()> {
        self.unused = unused;
        for number in 0..self.slots.len() {
            if !self.slots[number].ready {
                self.fill_unused(number)?;
            }
        }
        self.start_full_buckets()
    }

    /// Waits for all reductions. Returns the names of parameters that had no gradient on this rank.
    pub(crate) fn finish(&mut self) -> Result<Vec<String>> {
        let mut outcome = Ok(());
        for reduction in self.in_flight.drain(..) {
            // Waits for all, so that none writes to the buckets later; the first error is returned.
            outcome = outcome.and(reduction.finish());
        }
        outcome.map(|()| std::mem::take(&mut self.unused))
    }

    /// Sets a missing gradient to zero; one that was accumulated before this pass stays.
    fn fill_unused(&mut self, number: usize) -> Result<()> {
        let slot = &mut self.slots[number];
        if !slot.leaf.grad().defined() {
            let _ = tch::no_grad(|| slot.view.f_zero_())?;
            autograd::set_grad(&slot.leaf, &slot.view)?;
        }
        slot.ready = true;
        self.buckets[slot.bucket].num_missing -= 1;
        Ok(())
    }

    /// Clears the zero gradients of parameters that no rank used, so that optimizers skip them as they would on
    /// one rank. Returns their names.
    pub(crate) fn clear_globally_unused(&self, unused_here: &[String]) -> Result<Vec<String>> {
        let here: BTreeSet<&str> = unused_here.iter().map(String::as_str).collect();
        let used: Vec<i32> = self
            .slots
            .iter()
            .map(|slot| i32::from(!here.contains(slot.name.as_str())))
            .collect();
        let flags = Tensor::from_slice(&used);
        self.group
            .all_reduce(&flags, ReduceOp::Max, Purpose::Control)?
            .wait()?;
        let used = Vec::<i32>::try_from(&flags).map_err(TorchError::from)?;
        let mut unused = Vec::new();
        for (slot, used) in self.slots.iter().zip(used) {
            if used == 0 {
                autograd::clear_grad(&slot.leaf)?;
                unused.push(slot.name.clone());
            }
        }
        Ok(unused)
    }
}

/// Moves the gradient of a leaf into its bucket, unless it was accumulated there.
fn move_into(leaf: &Tensor, view: &Tensor) -> Result<()> {
    let grad = leaf.f_grad()?;
    if !grad.defined() || storage::is_shared(&grad, view)? {
        return Ok(());
    }
    tch::no_grad(|| view.shallow_clone().f_copy_(&grad))?;
    autograd::set_grad(leaf, view)
}

/// One contiguous buffer, and views of it in the shapes of `tensors`.
fn flat_buffer(tensors: &[&Tensor]) -> Result<(Tensor, Vec<Tensor>)> {
    let total: i64 = tensors.iter().map(|t| t.numel() as i64).sum();
    let Some(first) = tensors.first() else {
        return Err(TorchError::Invalid("a bucket needs a gradient".to_owned()));
    };
    // Created from a tensor, because the meta device has no `tch::Device`.
    let buffer = memory::scope(MemoryKind::Gradient, || {
        tch::no_grad(|| meta::new_zeros(first, &[total]))
    })?;
    let mut start = 0;
    let mut views = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let length = tensor.numel() as i64;
        views.push(buffer.f_narrow(0, start, length)?.f_view_as(tensor)?);
        start += length;
    }
    Ok((buffer, views))
}

fn bytes(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

//! Gradients on their way: into their bucket, over the wire, and back.

use std::collections::BTreeSet;
use std::sync::Arc;

use tch::{Kind, Tensor};
use trainyard_nn::Parameter;
use trainyard_torch::{Group, ReduceOp, Result, TorchError, autograd, memory, meta, storage};
use trainyard_trace::{MemoryKind, Purpose};

use crate::bucket::{BucketLimits, assign_buckets};
use crate::compress::{GradientHook, Reduction};

/// The buckets of one model, and how far the present backward pass has come with them.
pub(crate) struct Reducer {
    group: Group,
    op: ReduceOp,
    hook: Arc<dyn GradientHook>,
    overlap: bool,
    slots: Vec<Slot>,
    buckets: Vec<Bucket>,
    /// Reductions under way, in the order of the buckets: all ranks start them in this order.
    under_way: Vec<Box<dyn Reduction>>,
    /// Whether this pass ends in a reduction, or only accumulates.
    reducing: bool,
    /// Parameters without a gradient in the reduction under way.
    unused: Vec<String>,
}

/// One parameter's place in its bucket.
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

/// How to build a reducer.
#[derive(Clone)]
pub(crate) struct Plan {
    pub op: ReduceOp,
    pub hook: Arc<dyn GradientHook>,
    pub overlap: bool,
    pub limits: BucketLimits,
}

impl Reducer {
    /// `parameters` in order of use: backward finishes their gradients in the reverse of it.
    pub(crate) fn new(parameters: &[Parameter], group: &Group, plan: Plan) -> Result<Reducer> {
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
            under_way: Vec::new(),
            reducing: false,
            unused: Vec::new(),
        })
    }

    /// Every leaf with the number to report its gradient under.
    pub(crate) fn leaves(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        self.slots.iter().map(|slot| &slot.leaf).enumerate()
    }

    /// Makes every rank's parameters those of rank 0, a bucket at a time.
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

    /// A backward pass is about to begin.
    pub(crate) fn begin(&mut self, reducing: bool) -> Result<()> {
        // What a pass that failed left under way must not be taken for this one's.
        for reduction in std::mem::take(&mut self.under_way) {
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

    /// A gradient has been accumulated: it moves into its bucket, and the bucket leaves when full.
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

    /// Starts every bucket that is full and whose predecessors have started.
    fn start_full_buckets(&mut self) -> Result<()> {
        while let Some(bucket) = self.buckets.get(self.under_way.len())
            && bucket.num_missing == 0
        {
            let reduction = self.hook.reduce(&self.group, &bucket.buffer, self.op)?;
            self.under_way.push(reduction);
        }
        Ok(())
    }

    /// Names of parameters that have no gradient, of this pass or accumulated before it.
    pub(crate) fn unused(&self) -> Vec<String> {
        let missing = self
            .slots
            .iter()
            .filter(|s| !s.ready && !s.leaf.grad().defined());
        missing.map(|s| s.name.clone()).collect()
    }

    /// A reducing pass has ended: starts what is left, without the gradients of `unused`.
    pub(crate) fn start_rest(&mut self, unused: Vec<String>) -> Result<()> {
        self.unused = unused;
        for number in 0..self.slots.len() {
            if !self.slots[number].ready {
                self.fill_unused(number)?;
            }
        }
        self.start_full_buckets()
    }

    /// Waits for everything. Returns the names of parameters that had no gradient here.
    pub(crate) fn finish(&mut self) -> Result<Vec<String>> {
        let mut outcome = Ok(());
        for reduction in self.under_way.drain(..) {
            // Every one is waited for, so that none touches the buckets later; the first error counts.
            outcome = outcome.and(reduction.finish());
        }
        outcome.map(|()| std::mem::take(&mut self.unused))
    }

    /// Zero stands for a gradient that did not come; one accumulated before this pass stays.
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

    /// After a pass in which gradients were missing here or elsewhere: takes the zeros back where no
    /// rank had a gradient, so that optimisers skip those parameters as they would on one rank.
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

/// Moves the gradient of a leaf into its bucket, unless it was accumulated there in the first place.
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
    // From a tensor, not from a device: on meta there is no device to name.
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

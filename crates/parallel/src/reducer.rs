//! Bucketed gradient reduction of DDP.

use std::collections::BTreeSet;
use std::sync::Arc;

use tch::{Kind, Tensor};
use trainyard_cost::Volume;
use trainyard_nn::{BucketView, Parameter};
use trainyard_torch::{Group, ReduceOp, Result, TorchError, autograd, memory};
use trainyard_trace::{MemoryKind, Purpose};

use crate::compress::{GradientBucket, GradientHook, Reduction};
use crate::flat::{BucketLimits, FlatGrads, FlatParam, assign_buckets, zeros_flat};

/// The buckets of a model, and their progress in the current backward pass.
pub(crate) struct Reducer {
    group: Group,
    op: ReduceOp,
    hook: Arc<dyn GradientHook>,
    overlap: bool,
    buckets: Vec<FlatGrads>,
    /// What backward of a cast may write into, by bucket and member; `None` for parameters that layers do not cast.
    bucket_views: Vec<Vec<Option<BucketView>>>,
    /// What the hook has not sent of every bucket; none if it keeps no errors.
    errors: Vec<Tensor>,
    /// The training step of the current pass.
    step: u64,
    /// Reductions in flight, in the order of the buckets, in which all ranks start them.
    in_flight: Vec<Box<dyn Reduction>>,
    /// Whether this pass reduces gradients, or only accumulates them.
    reducing: bool,
    /// Parameters without a gradient in the current reduction.
    unused: Vec<String>,
}

/// A parameter's bucket, and its number in the bucket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    bucket: usize,
    member: usize,
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
        config: ReducerConfig,
    ) -> Result<Reducer> {
        let parameters: Vec<&Parameter> = parameters.iter().rev().collect();
        let bytes = |p: &Parameter| (p.tensor().numel() * p.kind().elt_size_in_bytes()) as u64;
        let sizes: Vec<(Kind, u64)> = parameters.iter().map(|p| (p.kind(), bytes(p))).collect();
        let total = sizes.iter().map(|(_, bytes)| bytes).sum();
        let (mut buckets, mut bucket_views) = (Vec::new(), Vec::new());
        for members in assign_buckets(&sizes, config.limits.for_total(total)) {
            let members: Vec<&Parameter> = members.into_iter().map(|n| parameters[n]).collect();
            bucket_views.push(members.iter().map(|p| bucket_view(p)).collect());
            buckets.push(bucket(members)?);
        }
        let errors = if config.hook.keeps_errors() {
            let errors = buckets.iter().map(|bucket| error_of(bucket.flat()));
            errors.collect::<Result<_>>()?
        } else {
            Vec::new()
        };
        Ok(Reducer {
            group: group.clone(),
            op: config.op,
            hook: config.hook,
            overlap: config.overlap,
            buckets,
            bucket_views,
            errors,
            step: 0,
            in_flight: Vec::new(),
            reducing: false,
            unused: Vec::new(),
        })
    }

    /// The communication of all buckets.
    pub(crate) fn volume(&self) -> Volume {
        let buckets = 0..self.buckets.len();
        let of_bucket = |index| self.hook.volume(&self.bucket(index), self.group.size());
        buckets.map(of_bucket).sum()
    }

    /// A bucket as the hook sees it.
    fn bucket(&self, index: usize) -> GradientBucket<'_> {
        GradientBucket {
            index,
            step: self.step,
            purpose: Purpose::Gradient,
            flat: self.buckets[index].flat(),
            members: self.buckets[index].views().collect(),
            error: self.errors.get(index),
        }
    }

    /// Sets the training step of the passes that follow.
    pub(crate) fn set_step(&mut self, step: u64) {
        self.step = step;
    }

    /// What has not been sent of every parameter's gradient, by name; empty if the hook keeps no errors.
    pub(crate) fn errors(&self) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        for index in 0..self.errors.len() {
            let bucket = self.bucket(index);
            for (member, (name, _)) in self.buckets[index].leaves().enumerate() {
                let error = bucket.error_of(member)?;
                all.extend(error.map(|error| (name.to_owned(), error)));
            }
        }
        Ok(all)
    }

    /// Bytes of all errors.
    pub(crate) fn error_bytes(&self) -> u64 {
        let bytes = |error: &Tensor| (error.numel() * error.kind().elt_size_in_bytes()) as u64;
        self.errors.iter().map(bytes).sum()
    }

    /// The ranks that reduce gradients.
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Every leaf, with the slot that identifies it in [`Reducer::set_ready`].
    pub(crate) fn leaves(&self) -> impl Iterator<Item = (Slot, &Tensor)> {
        self.buckets.iter().enumerate().flat_map(|(bucket, grads)| {
            let leaves = grads.leaves().enumerate();
            leaves.map(move |(member, (_, leaf))| (Slot { bucket, member }, leaf))
        })
    }

    /// Broadcasts the parameters of rank 0, bucket by bucket.
    pub(crate) fn broadcast_parameters(&self) -> Result<()> {
        let broadcast = |flat: &Tensor| self.group.broadcast(flat, 0, Purpose::Parameter)?.wait();
        self.buckets
            .iter()
            .try_for_each(|bucket| bucket.with_values(broadcast))
    }

    /// Begins a backward pass.
    pub(crate) fn begin(&mut self, reducing: bool) -> Result<()> {
        // A pass that failed may have left reductions in flight, which are not part of this pass.
        for reduction in std::mem::take(&mut self.in_flight) {
            reduction.finish()?;
        }
        self.reducing = reducing;
        self.buckets.iter_mut().for_each(FlatGrads::begin_pass);
        self.set_bucket_views()
    }

    /// Lets backward write the gradients that begin in this pass into their buckets.
    fn set_bucket_views(&self) -> Result<()> {
        for (bucket, bucket_views) in self.buckets.iter().zip(&self.bucket_views) {
            let members = bucket.leaves().zip(bucket.views());
            for (((_, leaf), view), bucket_view) in members.zip(bucket_views) {
                let Some(bucket_view) = bucket_view else {
                    continue;
                };
                let begins = !leaf.f_grad()?.defined();
                bucket_view.set(begins.then(|| view.f_detach()).transpose()?);
            }
        }
        Ok(())
    }

    /// Takes an accumulated gradient into its bucket, and starts the reduction of the bucket when it is full.
    pub(crate) fn set_ready(&mut self, slot: Slot) -> Result<()> {
        // A later gradient of this pass is added to this one.
        if let Some(bucket_view) = &self.bucket_views[slot.bucket][slot.member] {
            bucket_view.clear();
        }
        self.buckets[slot.bucket].set_ready(slot.member)?;
        if self.reducing && self.overlap {
            self.start_full_buckets()?;
        }
        Ok(())
    }

    /// Starts the reduction of every full bucket whose predecessors have started.
    fn start_full_buckets(&mut self) -> Result<()> {
        while let Some(bucket) = self.buckets.get(self.in_flight.len())
            && bucket.is_complete()
        {
            let bucket = self.bucket(self.in_flight.len());
            let reduction = self.hook.reduce(&self.group, &bucket, self.op)?;
            self.in_flight.push(reduction);
        }
        Ok(())
    }

    /// Names of parameters without a gradient, neither of this pass nor accumulated before.
    pub(crate) fn unused(&self) -> Vec<String> {
        self.buckets.iter().flat_map(FlatGrads::missing).collect()
    }

    /// Ends a reducing pass: starts the remaining buckets, with zeros for the parameters in `unused`.
    pub(crate) fn flush_buckets(&mut self, unused: Vec<String>) -> Result<()> {
        self.unused = unused;
        let mut buckets = self.buckets.iter_mut();
        buckets.try_for_each(FlatGrads::zero_missing)?;
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

    /// Clears the zero gradients of parameters that no rank used, so that optimizers skip them as they would on
    /// one rank. Returns their names.
    pub(crate) fn clear_globally_unused(&self, unused_here: &[String]) -> Result<Vec<String>> {
        let here: BTreeSet<&str> = unused_here.iter().map(String::as_str).collect();
        let leaves = || self.buckets.iter().flat_map(FlatGrads::leaves);
        let used = leaves().map(|(name, _)| i32::from(!here.contains(name)));
        let flags = Tensor::from_slice(&used.collect::<Vec<_>>());
        self.group
            .all_reduce(&flags, ReduceOp::Max, Purpose::Control)?
            .wait()?;
        let used = Vec::<i32>::try_from(&flags).map_err(TorchError::from)?;
        let mut unused = Vec::new();
        for ((name, leaf), used) in leaves().zip(used) {
            if used == 0 {
                autograd::clear_grad(leaf)?;
                unused.push(name.to_owned());
            }
        }
        Ok(unused)
    }
}

impl Drop for Reducer {
    /// Parameters outlive the reducer, and must not keep its buckets.
    fn drop(&mut self) {
        let bucket_views = self.bucket_views.iter().flatten().flatten();
        bucket_views.for_each(BucketView::clear);
    }
}

/// The bucket view of a parameter that layers cast.
fn bucket_view(parameter: &Parameter) -> Option<BucketView> {
    let is_cast = parameter.kind() != parameter.compute_kind();
    is_cast.then(|| parameter.bucket_view())
}

/// Zeros for the error of a flat gradient.
fn error_of(flat: &Tensor) -> Result<Tensor> {
    memory::scope(MemoryKind::Gradient, || {
        zeros_flat(flat, flat.numel(), Kind::Float)
    })
}

/// A bucket for the gradients of these parameters, which have one type.
fn bucket(parameters: Vec<&Parameter>) -> Result<FlatGrads> {
    let Some(first) = parameters.first() else {
        return Err(TorchError::Invalid("a bucket needs a gradient".to_owned()));
    };
    let lengths = parameters.iter().map(|p| p.tensor().numel()).collect();
    let layout = FlatParam::new(lengths, 1);
    let flat = memory::scope(MemoryKind::Gradient, || {
        zeros_flat(&first.tensor().f_detach()?, layout.total(), first.kind())
    })?;
    let leaves = parameters.iter().map(|p| (p.name(), p.tensor()));
    FlatGrads::new(flat, &layout, leaves, true)
}

//! The groups of a sharded model, and how a step unshards, reshards and reduces them.

use std::collections::VecDeque;
use std::ops::Range;

use tch::Tensor;
use trainyard_torch::{Group, ReduceOp, Result, TorchError};
use trainyard_trace::Purpose;

use super::Stage;
use super::flat_param_handle::{FlatParamHandle, ShardComm};
use super::offload_file::{Loaded, OffloadFile, OffloadOptions, OffloadStates};
use super::offloaded_states::OffloadedStates;
use super::pool::Pool;
use super::prefetch::PrefetchPolicy;
use crate::compress::{GradientBucket, GradientHook, ReduceScatter, Reduction};
use crate::offload::Counters;
use crate::strategy::GradSync;

/// How a sharded model communicates.
pub(super) struct CommConfig {
    pub stage: Stage,
    pub prefetch: PrefetchPolicy,
    pub op: ReduceOp,
    pub shards: ShardComm,
    pub replicate_group: Group,
    /// Whether buffers that no unit uses stay allocated.
    pub keeps_buffers: bool,
    /// Reduces the gradient shards of replicas.
    pub replica_hook: Box<dyn GradientHook>,
}

/// A parameter shard that is being updated.
pub(super) enum ShardInUse {
    /// From the offload file.
    Loaded(Loaded),
    /// In memory all the time.
    Resident(Tensor),
}

impl ShardInUse {
    pub(super) fn tensor(&self) -> &Tensor {
        match self {
            ShardInUse::Loaded(loaded) => &loaded[0],
            ShardInUse::Resident(tensor) => tensor,
        }
    }
}

/// The reduce-scatter of a group in flight.
struct Reducing {
    group: usize,
    work: ReduceScatter,
    /// Whether the result is added to the gradient shard of earlier passes.
    accumulate: bool,
}

/// Consecutive units with one flat parameter.
pub(super) struct UnitGroup {
    pub units: Range<usize>,
    /// None if the units have no trainable parameters.
    pub handle: Option<FlatParamHandle>,
}

/// The groups of units, their buffer pools, and the progress of the current pass.
pub(super) struct FsdpState {
    comm: CommConfig,
    groups: Vec<UnitGroup>,
    param_pool: Pool,
    gradient_pool: Pool,
    /// The file of the parameter shards, if they are offloaded.
    offload_file: Option<OffloadFile>,
    reducing: VecDeque<Reducing>,
    replicating: Vec<Box<dyn Reduction>>,
    sync: GradSync,
    /// Whether parameters stay gathered across passes.
    is_unsharded: bool,
    /// Whether the gradient shards contain gradients of earlier passes of this step.
    has_gradient_shards: bool,
    /// Whether gradients were reduced in this step.
    has_reduced: bool,
    /// Whether gradients are reduced once, after all passes.
    reduces_late: bool,
    missing: Vec<String>,
}

impl FsdpState {
    /// `like_param` and `like_gradient` have the types and the device of the pools, whose buffers fit the longest
    /// flat parameter.
    pub(super) fn new(
        comm: CommConfig,
        groups: Vec<UnitGroup>,
        like_param: &Tensor,
        like_gradient: &Tensor,
    ) -> FsdpState {
        let handles = groups.iter().filter_map(|group| group.handle.as_ref());
        let longest = handles.map(FlatParamHandle::padded).max().unwrap_or(0);
        let pool = |like| Pool::new(like, longest, comm.keeps_buffers);
        FsdpState {
            param_pool: pool(like_param),
            gradient_pool: pool(like_gradient),
            comm,
            groups,
            offload_file: None,
            reducing: VecDeque::new(),
            replicating: Vec::new(),
            sync: GradSync::Full,
            is_unsharded: false,
            has_gradient_shards: false,
            has_reduced: false,
            reduces_late: false,
            missing: Vec::new(),
        }
    }

    /// The flat parameters, with the indices of their groups.
    pub(super) fn handles(&self) -> impl Iterator<Item = (usize, &FlatParamHandle)> {
        let groups = self.groups.iter().enumerate();
        groups.filter_map(|(index, group)| Some((index, group.handle.as_ref()?)))
    }

    fn handles_mut(&mut self) -> impl Iterator<Item = &mut FlatParamHandle> {
        let groups = self.groups.iter_mut();
        groups.filter_map(|group| group.handle.as_mut())
    }

    /// The group of a unit.
    fn group_of(&self, unit: usize) -> usize {
        self.groups.partition_point(|group| group.units.end <= unit)
    }

    /// Begins a forward pass: refreshes the shards that the optimizer has changed. In stages 1 and 2, where
    /// parameters stay gathered, it gathers them anew, in the order in which they are needed.
    pub(super) fn begin_forward(&mut self) -> Result<()> {
        if self.max_in_flight() != usize::MAX {
            // Gradients in flight occupy the memory that parameters need.
            self.wait_for_reductions(0)?;
        }
        if self.offload_file.is_some() {
            // The optimizer step has already updated the shards.
            return Ok(());
        }
        if self.comm.stage != Stage::Parameters {
            return (0..self.groups.len()).try_for_each(|index| self.unshard_updated(index));
        }
        for group in &mut self.groups {
            if let Some(handle) = &mut group.handle
                && handle.refresh()?
            {
                handle.reshard(&mut self.param_pool)?;
            }
        }
        Ok(())
    }

    /// In stages 1 and 2, gathers a group that the optimizer has just updated, while the optimizer continues with the
    /// next one.
    pub(super) fn unshard_updated(&mut self, index: usize) -> Result<()> {
        let stays_unsharded = self.comm.stage != Stage::Parameters;
        let handle = self.groups[index].handle.as_mut();
        let Some(handle) = handle.filter(|_| stays_unsharded) else {
            return Ok(());
        };
        if !handle.refresh()? {
            return Ok(());
        }
        handle.invalidate()?;
        self.unshard(index)?;
        if self.comm.prefetch.overlap {
            Ok(())
        } else {
            self.wait_for_unshard(index)
        }
    }

    /// Waits for all gathers in flight.
    pub(super) fn wait_pending(&mut self) -> Result<()> {
        self.handles_mut()
            .filter(|handle| !handle.is_resharded())
            .try_for_each(FlatParamHandle::wait_for_unshard)
    }

    /// Unshards the unit's group, and prefetches the next groups.
    pub(super) fn before_forward(&mut self, unit: usize) -> Result<()> {
        let index = self.group_of(unit);
        self.unshard_with_prefetch(index, self.comm.prefetch.forward(index, self.groups.len()))
    }

    /// Reshards the unit's group after its last unit, if the policy requires it.
    pub(super) fn after_forward(&mut self, unit: usize, is_training: bool) -> Result<()> {
        let index = self.group_of(unit);
        if unit + 1 < self.groups[index].units.end {
            return Ok(());
        }
        let is_last = index + 1 == self.groups.len();
        if is_last && !is_training {
            return (0..self.groups.len()).try_for_each(|index| self.reshard(index));
        }
        let handle = self.groups[index].handle.as_ref();
        let is_shared = handle.is_some_and(|handle| handle.is_shared);
        if !is_shared && self.comm.prefetch.releases(is_last, is_training) {
            self.reshard(index)?;
        }
        if is_last {
            // Backward starts here: the groups that it needs next are gathered while the loss is computed.
            let mut next = self.comm.prefetch.backward(index);
            return next.try_for_each(|index| self.unshard(index));
        }
        Ok(())
    }

    /// Begins a backward pass.
    pub(super) fn begin_backward(&mut self, sync: GradSync) -> Result<()> {
        // A pass that failed may have left reductions in flight, which are not part of this pass.
        self.wait_for_reductions(0)?;
        self.has_gradient_shards |= self.has_reduced;
        self.sync = sync;
        self.missing.clear();
        Ok(())
    }

    /// Unshards the unit's group again, and prefetches the previous groups.
    pub(super) fn before_backward(&mut self, unit: usize) -> Result<()> {
        let index = self.group_of(unit);
        self.unshard_with_prefetch(index, self.comm.prefetch.backward(index))
    }

    /// Stages or defers a parameter's gradient, which this pass has completed.
    pub(super) fn gradient_ready(&mut self, index: usize, member: usize) -> Result<()> {
        let defers = self.sync == GradSync::None;
        let accumulates_in_place = self.comm.stage == Stage::OptimizerStates;
        match &mut self.groups[index].handle {
            Some(handle) if !accumulates_in_place && (defers || handle.has_deferred_grads()) => {
                handle.defer_grad(member)
            }
            Some(handle) => handle.stage_grad(member, &mut self.gradient_pool),
            None => Ok(()),
        }
    }

    /// Starts to reduce the gradients of the unit's group after its first unit, which backward reaches last, and waits
    /// for the reduction of the group before it.
    pub(super) fn after_backward(&mut self, unit: usize) -> Result<()> {
        let index = self.group_of(unit);
        if unit > self.groups[index].units.start {
            return Ok(());
        }
        let Some(handle) = &mut self.groups[index].handle else {
            return Ok(());
        };
        if self.sync == GradSync::None {
            handle.end_pass();
            return self.reshard(index);
        }
        let missing = handle.fill_missing(&mut self.gradient_pool)?;
        self.missing.extend(missing);
        if handle.is_done_after_backward()? {
            self.reshard(index)?;
        }
        match (self.comm.stage, self.sync) {
            (Stage::OptimizerStates, GradSync::ShardOnly) => Ok(()),
            _ => self.reduce_grads(index),
        }
    }

    /// Starts to reduce the gradients that several passes have accumulated.
    pub(super) fn reduce_all_grads(&mut self, sync: GradSync) -> Result<()> {
        self.begin_backward(sync)?;
        self.reduces_late = true;
        for index in (0..self.groups.len()).rev() {
            let Some(handle) = &mut self.groups[index].handle else {
                continue;
            };
            handle.end_pass();
            let missing = handle.fill_missing(&mut self.gradient_pool)?;
            self.missing.extend(missing);
            self.reduce_grads(index)?;
        }
        Ok(())
    }

    fn reduce_grads(&mut self, index: usize) -> Result<()> {
        self.has_reduced = true;
        let accumulate = self.has_gradient_shards && self.comm.stage != Stage::OptimizerStates;
        let Some(handle) = &self.groups[index].handle else {
            return Ok(());
        };
        let work = handle.reduce_grads(
            &self.comm.shards,
            self.comm.op,
            accumulate,
            &mut self.gradient_pool,
        )?;
        self.reducing.push_back(Reducing {
            group: index,
            work,
            accumulate,
        });
        self.wait_for_reductions(self.max_in_flight())
    }

    /// The maximum number of reductions in flight during backward: unlimited if gradients have memory of their own,
    /// otherwise one, whose memory the next group does not need.
    fn max_in_flight(&self) -> usize {
        let mut handles = self.handles().map(|(_, handle)| handle);
        match self.comm.prefetch.overlap {
            false => 0,
            true if handles.all(FlatParamHandle::owns_gradient_memory) => usize::MAX,
            true => 1,
        }
    }

    /// Waits for all reductions. Returns how gradients were synchronized, and the parameters without a gradient.
    pub(super) fn finish(&mut self) -> Result<(GradSync, Vec<String>)> {
        self.wait_for_reductions(0)?;
        if std::mem::take(&mut self.reduces_late) {
            // The next step starts with passes that do not use this pool, and need the memory.
            self.gradient_pool.empty();
        }
        for work in std::mem::take(&mut self.replicating) {
            work.finish()?;
        }
        self.has_gradient_shards |= self.has_reduced;
        Ok((self.sync, std::mem::take(&mut self.missing)))
    }

    /// Unshards all groups, and keeps them unsharded.
    pub(super) fn unshard_all(&mut self) -> Result<()> {
        self.begin_forward()?;
        self.is_unsharded = true;
        (0..self.groups.len()).try_for_each(|index| self.unshard(index))
    }

    /// Reshards all groups.
    pub(super) fn reshard_all(&mut self) -> Result<()> {
        self.is_unsharded = false;
        (0..self.groups.len()).try_for_each(|index| self.reshard(index))
    }

    /// Clears all gradients at the end of a step.
    pub(super) fn clear_gradients(&mut self) -> Result<()> {
        self.has_gradient_shards = false;
        self.has_reduced = false;
        self.handles_mut()
            .try_for_each(FlatParamHandle::clear_gradients)
    }

    fn unshard_with_prefetch(
        &mut self,
        index: usize,
        next: impl Iterator<Item = usize>,
    ) -> Result<()> {
        self.unshard(index)?;
        let mut last = index;
        for index in next {
            self.unshard(index)?;
            last = index;
        }
        if let Some(next) = self
            .comm
            .prefetch
            .next_after(index, last, self.groups.len())
        {
            self.read_ahead(next)?;
        }
        self.wait_for_unshard(index)
    }

    fn unshard(&mut self, index: usize) -> Result<()> {
        let handle = self.groups[index].handle.as_mut();
        let Some(handle) = handle.filter(|handle| handle.is_resharded()) else {
            return Ok(());
        };
        match self.comm.stage {
            Stage::Parameters if self.is_unsharded => handle.allocate()?,
            Stage::Parameters => handle.allocate_from_pool(&mut self.param_pool)?,
            _ => {}
        }
        let staged = self.offload_file.as_mut().map(|file| file.take(index));
        let staged = staged.transpose().map_err(to_torch_error)?;
        handle.unshard(&self.comm.shards, staged)
    }

    /// Offloads the master weights and, if asked, the parameter shards. Returns the offloaded optimizer states.
    pub(super) fn offload(&mut self, options: &OffloadOptions) -> crate::Result<OffloadedStates> {
        // The shards are computed from the master weights, so they must be up to date first.
        for handle in self.handles_mut() {
            handle.refresh()?;
        }
        let of_groups = |tensor: fn(&FlatParamHandle) -> Option<&Tensor>| -> Vec<Option<Tensor>> {
            let tensors = self
                .groups
                .iter()
                .map(|group| tensor(group.handle.as_ref()?));
            tensors
                .map(|tensor| tensor.map(Tensor::shallow_clone))
                .collect()
        };
        let (shards, masters) = (
            of_groups(|handle| Some(handle.param_shard())),
            of_groups(FlatParamHandle::master),
        );
        // Groups that are gathered ahead occupy additional staging buffers.
        let options = OffloadOptions {
            num_buffers: options.num_buffers + self.comm.prefetch.num_units,
            ..options.clone()
        };
        if options.states == OffloadStates::All {
            self.offload_file = Some(OffloadFile::filled(&options, "parameters", &shards)?);
        } else if masters.iter().any(Option::is_some) {
            self.handles_mut()
                .for_each(FlatParamHandle::set_master_offloaded);
        }
        OffloadedStates::new(options, &masters)
    }

    /// Starts to read a group's parameter shard from the offload file.
    pub(super) fn read_ahead(&mut self, index: usize) -> Result<()> {
        match (&mut self.offload_file, &self.groups[index].handle) {
            (Some(file), Some(_)) => file.read_ahead(index).map_err(to_torch_error),
            _ => Ok(()),
        }
    }

    /// A group's parameter shard, for an update.
    pub(super) fn take_shard(&mut self, index: usize) -> crate::Result<ShardInUse> {
        if let Some(file) = &mut self.offload_file {
            return Ok(ShardInUse::Loaded(file.take(index)?));
        }
        let handle = self.groups[index].handle.as_ref();
        let shard = handle.ok_or(crate::ParallelError::NothingToShard)?;
        Ok(ShardInUse::Resident(shard.param_shard().shallow_clone()))
    }

    /// Ends the update of a group's parameter shard: writes it back in the background, or marks it as updated.
    pub(super) fn put_shard(&mut self, index: usize, shard: ShardInUse) -> crate::Result<()> {
        match (shard, &mut self.offload_file) {
            (ShardInUse::Loaded(loaded), Some(file)) => file.write_behind(loaded),
            _ => {
                if let Some(handle) = &mut self.groups[index].handle {
                    handle.set_updated();
                }
                Ok(())
            }
        }
    }

    pub(super) fn offload_counters(&self) -> Option<Counters> {
        self.offload_file.as_ref().and_then(OffloadFile::counters)
    }

    fn wait_for_unshard(&mut self, index: usize) -> Result<()> {
        match &mut self.groups[index].handle {
            Some(handle) => handle.wait_for_unshard(),
            None => Ok(()),
        }
    }

    fn reshard(&mut self, index: usize) -> Result<()> {
        match (&mut self.groups[index].handle, self.comm.stage) {
            (Some(handle), Stage::Parameters) if !self.is_unsharded => {
                handle.reshard(&mut self.param_pool)
            }
            _ => Ok(()),
        }
    }

    /// Waits until at most `allowed` reductions are in flight.
    fn wait_for_reductions(&mut self, allowed: usize) -> Result<()> {
        while self.reducing.len() > allowed
            && let Some(reducing) = self.reducing.pop_front()
        {
            reducing.work.wait()?;
            let Some(handle) = &mut self.groups[reducing.group].handle else {
                continue;
            };
            let param_pool = match self.comm.stage {
                Stage::Parameters => Some(&mut self.param_pool),
                _ => None,
            };
            handle.wait_for_reduce(reducing.accumulate, param_pool, &mut self.gradient_pool)?;
            // Replicas all-reduce once per step, and only their shards.
            if self.sync == GradSync::Full && self.comm.replicate_group.size() > 1 {
                let bucket = GradientBucket {
                    index: reducing.group,
                    step: 0,
                    purpose: Purpose::Gradient,
                    flat: handle.gradient_shard(),
                    members: Vec::new(),
                    error: None,
                };
                let (group, op) = (&self.comm.replicate_group, self.comm.op);
                self.replicating
                    .push(self.comm.replica_hook.reduce(group, &bucket, op)?);
            }
        }
        Ok(())
    }
}

/// Converts an offload error for callers inside a forward or backward pass.
fn to_torch_error(error: crate::ParallelError) -> TorchError {
    TorchError::Other(error.to_string())
}

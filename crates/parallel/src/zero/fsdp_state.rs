//! The units of a sharded model, and how a step gathers, releases and reduces them.

use std::collections::VecDeque;

use tch::Tensor;
use trainyard_torch::{Group, ReduceOp, Result, TorchError, Work};
use trainyard_trace::Purpose;

use super::Stage;
use super::flat_param_handle::FlatParamHandle;
use super::offload_file::{Loaded, OffloadFile, OffloadOptions};
use super::offloaded_states::OffloadedStates;
use super::pool::Pool;
use super::prefetch::PrefetchPolicy;
use crate::offload::Counters;
use crate::strategy::GradSync;

/// How a sharded model communicates.
pub(super) struct CommConfig {
    pub stage: Stage,
    pub prefetch: PrefetchPolicy,
    pub op: ReduceOp,
    pub shard_group: Group,
    pub replicate_group: Group,
}

/// The reduce-scatter of a unit in flight.
struct Reducing {
    unit: usize,
    work: Work,
    /// Whether the result is added to the gradient shard of earlier passes.
    accumulate: bool,
}

/// The units, their buffer pools, and the progress of the current pass.
pub(super) struct FsdpState {
    comm: CommConfig,
    /// One entry per unit of the model; none if a unit has no trainable parameters.
    units: Vec<Option<FlatParamHandle>>,
    param_pool: Pool,
    gradient_pool: Pool,
    /// The file of the parameter shards, if they are offloaded.
    offload_file: Option<OffloadFile>,
    reducing: VecDeque<Reducing>,
    replicating: Vec<Work>,
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
        units: Vec<Option<FlatParamHandle>>,
        like_param: &Tensor,
        like_gradient: &Tensor,
    ) -> FsdpState {
        let longest = units.iter().flatten().map(FlatParamHandle::padded).max();
        let longest = longest.unwrap_or(0);
        FsdpState {
            comm,
            units,
            param_pool: Pool::new(like_param, longest),
            gradient_pool: Pool::new(like_gradient, longest),
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

    pub(super) fn units(&self) -> impl Iterator<Item = (usize, &FlatParamHandle)> {
        let units = self.units.iter().enumerate();
        units.filter_map(|(index, unit)| Some((index, unit.as_ref()?)))
    }

    /// Begins a forward pass: refreshes the shards that the optimizer has changed. In stages 1 and 2, where
    /// parameters stay gathered, it gathers them anew, in the order in which they are needed.
    pub(super) fn begin_forward(&mut self) -> Result<()> {
        if self.max_in_flight() != usize::MAX {
            // Gradients in flight occupy the memory that parameters need.
            self.finish_reducing(0)?;
        }
        if self.offload_file.is_some() {
            // The optimizer step has already updated the shards.
            return Ok(());
        }
        let stays_gathered = self.comm.stage != Stage::Parameters;
        for index in 0..self.units.len() {
            let Some(unit) = &mut self.units[index] else {
                continue;
            };
            if !unit.refresh()? {
                continue;
            }
            if stays_gathered {
                unit.invalidate()?
            } else {
                unit.release(&mut self.param_pool)?
            }
            if stays_gathered {
                self.start_gather(index)?;
                if !self.comm.prefetch.overlap {
                    self.finish_gather(index)?;
                }
            }
        }
        Ok(())
    }

    /// Gathers a unit that the optimizer has just updated, in stages 1 and 2, while the optimizer continues with the
    /// next unit.
    pub(super) fn all_gather_updated(&mut self, index: usize) -> Result<()> {
        let stays_gathered = self.comm.stage != Stage::Parameters;
        let Some(unit) = self.units[index].as_mut().filter(|_| stays_gathered) else {
            return Ok(());
        };
        if !unit.refresh()? {
            return Ok(());
        }
        unit.invalidate()?;
        self.start_gather(index)?;
        if self.comm.prefetch.overlap {
            Ok(())
        } else {
            self.finish_gather(index)
        }
    }

    /// Waits for all gathers in flight.
    pub(super) fn wait_pending(&mut self) -> Result<()> {
        let mut units = self.units.iter_mut().flatten();
        units
            .by_ref()
            .filter(|unit| !unit.is_released())
            .try_for_each(FlatParamHandle::finish_gather)
    }

    /// Gathers the unit's parameters, and prefetches those of the next units.
    pub(super) fn before_forward(&mut self, index: usize) -> Result<()> {
        self.gather_with_prefetch(index, self.comm.prefetch.forward(index, self.units.len()))
    }

    /// Releases the unit's parameters, if the policy requires it.
    pub(super) fn after_forward(&mut self, index: usize, is_training: bool) -> Result<()> {
        let is_last = index + 1 == self.units.len();
        if is_last && !is_training {
            return (0..self.units.len()).try_for_each(|index| self.release(index));
        }
        let is_shared = self.units[index]
            .as_ref()
            .is_some_and(|unit| unit.is_shared);
        if !is_shared && self.comm.prefetch.releases(is_last, is_training) {
            self.release(index)?;
        }
        if is_last {
            // Backward starts here: the units that it needs next are gathered while the loss is computed.
            let mut next = self.comm.prefetch.backward(index);
            return next.try_for_each(|index| self.start_gather(index));
        }
        Ok(())
    }

    /// Begins a backward pass.
    pub(super) fn begin_backward(&mut self, sync: GradSync) -> Result<()> {
        // A pass that failed may have left reductions in flight, which are not part of this pass.
        self.finish_reducing(0)?;
        self.has_gradient_shards |= self.has_reduced;
        self.sync = sync;
        self.missing.clear();
        Ok(())
    }

    /// Gathers the unit's parameters again, and prefetches those of the previous units.
    pub(super) fn before_backward(&mut self, index: usize) -> Result<()> {
        self.gather_with_prefetch(index, self.comm.prefetch.backward(index))
    }

    /// Stages or defers a parameter's gradient, which this pass has completed.
    pub(super) fn gradient_ready(&mut self, index: usize, member: usize) -> Result<()> {
        let defers = self.sync == GradSync::None;
        let accumulates_in_place = self.comm.stage == Stage::OptimizerStates;
        match &mut self.units[index] {
            Some(unit) if !accumulates_in_place && (defers || unit.has_deferred_grads()) => {
                unit.defer_grad(member)
            }
            Some(unit) => unit.stage_grad(member, &mut self.gradient_pool),
            None => Ok(()),
        }
    }

    /// Starts to reduce the unit's gradients, and waits for the reduction of the unit before it.
    pub(super) fn after_backward(&mut self, index: usize) -> Result<()> {
        let Some(unit) = &mut self.units[index] else {
            return Ok(());
        };
        if self.sync == GradSync::None {
            unit.end_pass();
            return self.release(index);
        }
        let missing = unit.fill_missing(&mut self.gradient_pool)?;
        self.missing.extend(missing);
        if unit.is_done_after_backward()? {
            self.release(index)?;
        }
        match (self.comm.stage, self.sync) {
            (Stage::OptimizerStates, GradSync::ShardOnly) => Ok(()),
            _ => self.start_reduce(index),
        }
    }

    /// Starts to reduce the gradients that several passes have accumulated.
    pub(super) fn start_reduce_all(&mut self, sync: GradSync) -> Result<()> {
        self.begin_backward(sync)?;
        self.reduces_late = true;
        for index in (0..self.units.len()).rev() {
            let Some(unit) = &mut self.units[index] else {
                continue;
            };
            unit.end_pass();
            let missing = unit.fill_missing(&mut self.gradient_pool)?;
            self.missing.extend(missing);
            self.start_reduce(index)?;
        }
        Ok(())
    }

    fn start_reduce(&mut self, index: usize) -> Result<()> {
        self.has_reduced = true;
        let accumulate = self.has_gradient_shards && self.comm.stage != Stage::OptimizerStates;
        let Some(unit) = &self.units[index] else {
            return Ok(());
        };
        let work = unit.start_reduce(
            &self.comm.shard_group,
            self.comm.op,
            accumulate,
            &mut self.gradient_pool,
        )?;
        self.reducing.push_back(Reducing {
            unit: index,
            work,
            accumulate,
        });
        self.finish_reducing(self.max_in_flight())
    }

    /// The maximum number of reductions in flight during backward: unlimited if gradients have memory of their own,
    /// otherwise one, whose memory the next unit does not need.
    fn max_in_flight(&self) -> usize {
        let mut units = self.units.iter().flatten();
        match self.comm.prefetch.overlap {
            false => 0,
            true if units.all(FlatParamHandle::owns_gradient_memory) => usize::MAX,
            true => 1,
        }
    }

    /// Waits for all reductions. Returns how gradients were synchronized, and the parameters without a gradient.
    pub(super) fn finish(&mut self) -> Result<(GradSync, Vec<String>)> {
        self.finish_reducing(0)?;
        if std::mem::take(&mut self.reduces_late) {
            // The next step starts with passes that do not use this pool, and need the memory.
            self.gradient_pool.empty();
        }
        for work in std::mem::take(&mut self.replicating) {
            work.wait()?;
        }
        self.has_gradient_shards |= self.has_reduced;
        Ok((self.sync, std::mem::take(&mut self.missing)))
    }

    /// Gathers all units and keeps them gathered.
    pub(super) fn unshard(&mut self) -> Result<()> {
        self.begin_forward()?;
        self.is_unsharded = true;
        (0..self.units.len()).try_for_each(|index| self.start_gather(index))
    }

    /// Releases all units.
    pub(super) fn reshard(&mut self) -> Result<()> {
        self.is_unsharded = false;
        (0..self.units.len()).try_for_each(|index| self.release(index))
    }

    /// Clears all gradients at the end of a step.
    pub(super) fn clear_gradients(&mut self) -> Result<()> {
        self.has_gradient_shards = false;
        self.has_reduced = false;
        let mut units = self.units.iter_mut().flatten();
        units.try_for_each(FlatParamHandle::clear_gradients)
    }

    fn gather_with_prefetch(
        &mut self,
        index: usize,
        next: impl Iterator<Item = usize>,
    ) -> Result<()> {
        self.start_gather(index)?;
        let mut last = index;
        for index in next {
            self.start_gather(index)?;
            last = index;
        }
        if let Some(next) = self.comm.prefetch.next_after(index, last, self.units.len()) {
            self.read_ahead(next)?;
        }
        self.finish_gather(index)
    }

    fn start_gather(&mut self, index: usize) -> Result<()> {
        let Some(unit) = self.units[index].as_mut().filter(|u| u.is_released()) else {
            return Ok(());
        };
        match self.comm.stage {
            Stage::Parameters if self.is_unsharded => unit.allocate()?,
            Stage::Parameters => unit.allocate_from_pool(&mut self.param_pool)?,
            _ => {}
        }
        let staged = self.offload_file.as_mut().map(|file| file.take(index));
        let staged = staged.transpose().map_err(to_torch_error)?;
        unit.start_gather(&self.comm.shard_group, staged)
    }

    /// Offloads the parameter shards to a file. Returns the offloaded master weights.
    pub(super) fn offload(&mut self, options: &OffloadOptions) -> crate::Result<OffloadedStates> {
        // The shards are computed from the master weights, so they must be up to date first.
        for unit in self.units.iter_mut().flatten() {
            unit.refresh()?;
        }
        let of_units = |tensor: fn(&FlatParamHandle) -> Option<&Tensor>| -> Vec<Option<Tensor>> {
            let tensors = self.units.iter().map(|unit| tensor(unit.as_ref()?));
            tensors
                .map(|tensor| tensor.map(Tensor::shallow_clone))
                .collect()
        };
        let (shards, masters) = (
            of_units(|unit| Some(unit.param_shard())),
            of_units(FlatParamHandle::master),
        );
        // Units that are gathered ahead occupy additional staging buffers.
        let options = OffloadOptions {
            num_buffers: options.num_buffers + self.comm.prefetch.num_units,
            ..options.clone()
        };
        self.offload_file = Some(OffloadFile::filled(&options, "parameters", &shards)?);
        OffloadedStates::new(options, &masters)
    }

    /// Starts to read a unit's parameter shard from the offload file.
    pub(super) fn read_ahead(&mut self, index: usize) -> Result<()> {
        match (&mut self.offload_file, &self.units[index]) {
            (Some(file), Some(_)) => file.read_ahead(index).map_err(to_torch_error),
            _ => Ok(()),
        }
    }

    /// Takes a unit's parameter shard from the offload file for an update.
    pub(super) fn take_shard(&mut self, index: usize) -> crate::Result<Loaded> {
        match &mut self.offload_file {
            Some(file) => file.take(index),
            None => Err(crate::ParallelError::OffloadNeedsStage3),
        }
    }

    /// Writes a unit's parameter shard back in the background.
    pub(super) fn put_shard(&mut self, staged: Loaded) -> crate::Result<()> {
        self.offload_file
            .as_mut()
            .map_or(Ok(()), |file| file.write_behind(staged))
    }

    pub(super) fn offload_counters(&self) -> Option<Counters> {
        self.offload_file.as_ref().map(OffloadFile::counters)
    }

    fn finish_gather(&mut self, index: usize) -> Result<()> {
        match &mut self.units[index] {
            Some(unit) => unit.finish_gather(),
            None => Ok(()),
        }
    }

    fn release(&mut self, index: usize) -> Result<()> {
        match (&mut self.units[index], self.comm.stage) {
            (Some(unit), Stage::Parameters) if !self.is_unsharded => {
                unit.release(&mut self.param_pool)
            }
            _ => Ok(()),
        }
    }

    /// Waits until at most `allowed` reductions are in flight.
    fn finish_reducing(&mut self, allowed: usize) -> Result<()> {
        while self.reducing.len() > allowed
            && let Some(reducing) = self.reducing.pop_front()
        {
            reducing.work.wait()?;
            let Some(unit) = &mut self.units[reducing.unit] else {
                continue;
            };
            let param_pool = match self.comm.stage {
                Stage::Parameters => Some(&mut self.param_pool),
                _ => None,
            };
            unit.finish_reduce(reducing.accumulate, param_pool, &mut self.gradient_pool)?;
            // Replicas all-reduce once per step, and only their shards.
            if self.sync == GradSync::Full && self.comm.replicate_group.size() > 1 {
                self.replicating.push(self.comm.replicate_group.all_reduce(
                    unit.gradient_shard(),
                    self.comm.op,
                    Purpose::Gradient,
                )?);
            }
        }
        Ok(())
    }
}

/// Converts an offload error for callers inside a forward or backward pass.
fn to_torch_error(error: crate::ParallelError) -> TorchError {
    TorchError::Other(error.to_string())
}

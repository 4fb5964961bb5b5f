//! One sharded unit: its flat parameter, its gradients, and the operations on them.

use std::collections::BTreeSet;
use std::sync::Arc;

use tch::{Kind, Tensor};
use trainyard_mesh::Placement;
use trainyard_nn::Parameter;
use trainyard_torch::{Group, ReduceOp, Result, TorchError, memory, storage};
use trainyard_trace::{MemoryKind, Purpose};

use super::GroupSharding;
use super::offload_file::Loaded;
use super::pool::Pool;
use crate::compress::{Codec, Gather, ReduceScatter};
use crate::flat::{FlatGrads, FlatParam, view_as, without_storage, zeros_flat};
use trainyard_cost::Stage;

/// The types of a unit's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kinds {
    pub master: Kind,
    pub param: Kind,
    pub reduce: Kind,
}

/// Whether the flat parameter is unsharded.
enum Status {
    Sharded,
    /// The all-gather in flight, and the staging buffer of its input if the shard is offloaded.
    Unsharding(Box<(Gather, Option<Loaded>)>),
    Unsharded,
}

/// A shard of a second copy of the flat parameter, which fewer ranks share. It is taken from the flat parameter when that is
/// gathered from all ranks, and serves later gathers until the parameters change.
struct SecondaryShard {
    tensor: Tensor,
    /// This rank's index among those that share the copy.
    index: usize,
    is_current: bool,
}

/// How flat parameters are gathered and reduced.
pub(super) struct ShardComm {
    pub group: Group,
    pub secondary_group: Option<Group>,
    pub gradient_codec: Option<Arc<dyn Codec>>,
    pub parameter_codec: Option<Arc<dyn Codec>>,
}

/// The flat parameter of a unit: gathered while needed, otherwise this rank's shard of it.
pub(super) struct FlatParamHandle {
    layout: FlatParam,
    /// This rank's index in the shard group.
    index: usize,
    /// The members' gradients: in stage 1 autograd accumulates them here, in stages 2 and 3 they are moved here.
    grads: FlatGrads,
    status: Status,
    /// The gathered flat parameter, in the type of computation.
    full: Tensor,
    /// This rank's shard, in the type of the optimizer.
    master: Tensor,
    /// This rank's shard as it is gathered; the master shard itself if types are equal.
    param_shard: Tensor,
    /// This rank's shard of the second copy of the parameters.
    secondary: Option<SecondaryShard>,
    /// The version of the master shard from which `param_shard` was last computed.
    version: i64,
    /// Of offloaded master weights: whether `param_shard` has been computed anew since the last call of `refresh`.
    is_updated: Option<bool>,
    /// The flat gradient as it is reduced; another tensor than that of `grads` if it has another type.
    gradients: Tensor,
    /// Unsharded gradients whose reduction is deferred to the end of several passes, in stages 2 and 3.
    deferred: Option<FlatGrads>,
    /// Members whose gradients were deferred in this step. A step may reduce deferred gradients several times.
    deferred_members: BTreeSet<usize>,
    /// This rank's shard of the reduced gradients.
    gradient_shard: Tensor,
    /// Whether the flat parameter has memory of its own, not from the pool.
    owns_memory: bool,
    /// Whether another unit computes with this unit's parameters too.
    pub is_shared: bool,
}

impl FlatParamHandle {
    /// Shards the parameters of a unit and releases what other ranks hold. Returns this rank's shards, each under
    /// its parameter's name.
    pub(super) fn new(
        parameters: &[Parameter],
        group: &Group,
        sharding: &GroupSharding,
        kinds: Kinds,
    ) -> Result<(FlatParamHandle, Vec<Parameter>)> {
        let stage = sharding.stage;
        let lengths = parameters.iter().map(|p| p.tensor().numel()).collect();
        let layout = FlatParam::new(lengths, group.size());
        let like = parameters[0].tensor().f_detach()?;
        let allocation = Allocation {
            like: &like,
            layout: &layout,
            index: group.index(),
            stage,
            kinds,
        };
        let full = allocation.full()?;
        let (master, param_shard) = allocation.shards(&full)?;
        let (gradients, grad_accum) = allocation.gradients(&full)?;
        let gradient_shard = allocation.gradient_shard(&gradients)?;
        let leaves = parameters.iter().map(|p| (p.name(), p.tensor()));
        let is_in_place = grad_accum.is_some();
        let flat = grad_accum.unwrap_or_else(|| gradients.shallow_clone());
        let mut unit = FlatParamHandle {
            index: group.index(),
            grads: FlatGrads::new(flat, &layout, leaves, is_in_place)?,
            status: Status::Sharded,
            full,
            param_shard,
            secondary: None,
            version: -1,
            is_updated: None,
            gradients,
            deferred: None,
            deferred_members: BTreeSet::new(),
            gradient_shard,
            owns_memory: false,
            is_shared: false,
            master,
            layout,
        };
        let mut shards = Vec::with_capacity(parameters.len());
        for (member, parameter) in parameters.iter().enumerate() {
            shards.push(unit.shard(member, parameter, sharding)?);
        }
        if stage != Stage::Parameters {
            // Every rank started with the full parameters, so there is nothing to gather yet.
            unit.refresh()?;
            unit.status = Status::Unsharded;
        }
        Ok((unit, shards))
    }

    /// Writes this rank's shard of a parameter, and makes its leaf a view of the flat parameter.
    fn shard(
        &mut self,
        member: usize,
        parameter: &Parameter,
        sharding: &GroupSharding,
    ) -> Result<Parameter> {
        let leaf = parameter.tensor();
        let (elements, offset) = self.layout.shard_of(member, self.index);
        let shard = self
            .master
            .f_narrow(0, offset as i64, elements.len() as i64)?;
        parameter.copy_elements(elements, &shard).map_err(of_nn)?;
        let full = view_as(&self.full, self.layout.interval(member), leaf)?;
        if sharding.stage != Stage::Parameters {
            let all = 0..leaf.numel();
            let flat = full.f_view(-1i64)?;
            parameter.copy_elements(all, &flat).map_err(of_nn)?;
        }
        parameter.rebind(&full).map_err(of_nn)?;
        let packed = Placement::Packed(self.layout.packed(member));
        let layout = sharding
            .axes
            .iter()
            .fold(parameter.layout(), |layout, axis| layout.with(axis, packed));
        // The only shard of a parameter is the parameter itself.
        let is_whole = sharding.axes.is_empty();
        let shard = if is_whole {
            shard.f_view_as(leaf)?
        } else {
            shard
        };
        let shard = shard.f_detach()?.f_set_requires_grad(true)?;
        parameter.shard(shard, layout).map_err(of_nn)
    }

    /// The leaves of all members, in order: the parameters that layers compute with, views of the flat parameter.
    pub(super) fn leaves(&self) -> impl Iterator<Item = &Tensor> {
        self.grads.leaves().map(|(_, leaf)| leaf)
    }

    /// This rank's shard of a member's gradient.
    pub(super) fn gradient_of(&self, member: usize) -> Result<Tensor> {
        let interval = self.interval_in_chunk(member);
        let (start, length) = (interval.start as i64, interval.len() as i64);
        Ok(self.gradient_shard.f_narrow(0, start, length)?)
    }

    /// The interval of a member's shard in this rank's chunk.
    pub(super) fn interval_in_chunk(&self, member: usize) -> std::ops::Range<usize> {
        let (elements, offset) = self.layout.shard_of(member, self.index);
        offset..offset + elements.len()
    }

    /// This rank's shard as it is gathered.
    pub(super) fn param_shard(&self) -> &Tensor {
        &self.param_shard
    }

    /// This rank's master shard, if it is not the parameter shard itself.
    pub(super) fn master(&self) -> Option<&Tensor> {
        (self.master.kind() != self.param_shard.kind()).then_some(&self.master)
    }

    /// Number of elements of the flat parameter, padding included.
    pub(super) fn padded(&self) -> usize {
        self.layout.padded()
    }

    /// Whether the flat gradient that is reduced has memory of its own, which no other unit waits for.
    pub(super) fn owns_gradient_memory(&self) -> bool {
        let accumulates = self.grads.is_in_place();
        accumulates && self.grads.flat().kind() == self.gradients.kind() || self.deferred.is_some()
    }

    /// Whether gradients overwrite the gathered parameters.
    fn shares_memory(&self) -> Result<bool> {
        storage::is_shared(&self.full, &self.gradients)
    }

    /// Recomputes the parameter shard if the optimizer has changed the master shard since the last call. Returns
    /// whether it has.
    pub(super) fn refresh(&mut self) -> Result<bool> {
        if let Some(is_updated) = &mut self.is_updated {
            return Ok(std::mem::take(is_updated));
        }
        let version = storage::version(&self.master)?;
        if version == self.version {
            return Ok(false);
        }
        if self.param_shard.kind() != self.master.kind() {
            tch::no_grad(|| self.param_shard.shallow_clone().f_copy_(&self.master))?;
        }
        if let Some(secondary) = &mut self.secondary {
            secondary.is_current = false;
        }
        // Read again, since the copy may have bumped the version too.
        self.version = storage::version(&self.master)?;
        Ok(true)
    }

    /// From now on, who updates the master weights computes the parameter shard too, and calls [`Self::set_updated`].
    pub(super) fn set_master_offloaded(&mut self) {
        self.is_updated = Some(false);
    }

    /// The parameter shard has been computed anew from offloaded master weights.
    pub(super) fn set_updated(&mut self) {
        if let Some(is_updated) = &mut self.is_updated {
            *is_updated = true;
        }
    }

    /// Allocates memory of its own for a flat parameter that stays gathered.
    pub(super) fn allocate(&mut self) -> Result<()> {
        self.owns_memory = true;
        memory::scope(MemoryKind::Parameter, || storage::restore(&self.full))
    }

    /// Takes memory from the pool for a flat parameter that is released soon.
    pub(super) fn allocate_from_pool(&mut self, pool: &mut Pool) -> Result<()> {
        pool.acquire(&self.full)
    }

    /// Keeps a second copy of the parameters, sharded over `group`.
    pub(super) fn keep_secondary(&mut self, group: &Group) -> Result<()> {
        let length = self.layout.padded() / group.size();
        let kind = self.param_shard.kind();
        let tensor = memory::scope(MemoryKind::Parameter, || {
            zeros_flat(&self.param_shard, length, kind)
        })?;
        self.secondary = Some(SecondaryShard {
            tensor,
            index: group.index(),
            is_current: false,
        });
        Ok(())
    }

    /// Starts the all-gather. `staged` is the parameter shard if it is offloaded.
    pub(super) fn unshard(&mut self, comm: &ShardComm, staged: Option<Loaded>) -> Result<()> {
        let secondary = self.secondary.as_ref().filter(|s| s.is_current);
        let gather = match (secondary, &comm.secondary_group) {
            (Some(secondary), Some(group)) => {
                let tensors = (&self.full, &secondary.tensor);
                Gather::start(group, None, tensors, Purpose::Parameter)?
            }
            _ => {
                let shard = staged
                    .as_ref()
                    .map_or(&self.param_shard, |staged| &staged[0]);
                let codec = comm.parameter_codec.as_ref();
                Gather::start(&comm.group, codec, (&self.full, shard), Purpose::Parameter)?
            }
        };
        self.status = Status::Unsharding(Box::new((gather, staged)));
        Ok(())
    }

    /// Whether the flat parameter is neither gathered nor being gathered.
    pub(super) fn is_resharded(&self) -> bool {
        matches!(self.status, Status::Sharded)
    }

    /// Waits until the flat parameter is gathered.
    pub(super) fn wait_for_unshard(&mut self) -> Result<()> {
        let status = std::mem::replace(&mut self.status, Status::Unsharded);
        if let Status::Unsharding(gathering) = status {
            let (gather, _staged) = *gathering;
            gather.wait()?;
            self.update_secondary()?;
        }
        Ok(())
    }

    /// Takes this rank's shard of the second copy from the gathered flat parameter, if it has changed.
    fn update_secondary(&mut self) -> Result<()> {
        if let Some(secondary) = self.secondary.as_mut().filter(|s| !s.is_current) {
            let length = secondary.tensor.numel() as i64;
            let start = secondary.index as i64 * length;
            let shard = self.full.f_narrow(0, start, length)?;
            tch::no_grad(|| secondary.tensor.f_copy_(&shard))?;
            secondary.is_current = true;
        }
        Ok(())
    }

    /// Releases the memory of the gathered flat parameter.
    pub(super) fn reshard(&mut self, pool: &mut Pool) -> Result<()> {
        if matches!(self.status, Status::Sharded) {
            return Ok(());
        }
        self.wait_for_unshard()?;
        self.status = Status::Sharded;
        if std::mem::take(&mut self.owns_memory) {
            storage::release(&self.full)
        } else {
            pool.release(&self.full)
        }
    }

    /// Marks the gathered flat parameter as outdated, without releasing its memory.
    pub(super) fn invalidate(&mut self) -> Result<()> {
        self.wait_for_unshard()?;
        self.status = Status::Sharded;
        Ok(())
    }

    /// Takes a member's gradient into the flat gradient.
    pub(super) fn stage_grad(&mut self, number: usize, pool: &mut Pool) -> Result<()> {
        self.allocate_gradients(pool)?;
        self.grads.set_ready(number)
    }

    /// Takes memory for the flat gradient from the pool, if it needs some and this pass has not staged a gradient yet.
    fn allocate_gradients(&self, pool: &mut Pool) -> Result<()> {
        if self.grads.is_untouched() && !self.grads.is_in_place() && !self.shares_memory()? {
            pool.acquire(&self.gradients)?;
        }
        Ok(())
    }

    /// Adds a member's gradient to those whose reduction is deferred.
    pub(super) fn defer_grad(&mut self, number: usize) -> Result<()> {
        let mut deferred = match self.deferred.take() {
            Some(deferred) => deferred,
            None => self.new_deferred_grads()?,
        };
        deferred.set_ready(number)?;
        self.deferred_members.insert(number);
        self.deferred = Some(deferred);
        Ok(())
    }

    /// A flat gradient of zeros, to which passes add. Autograd does so itself if types are equal.
    fn new_deferred_grads(&self) -> Result<FlatGrads> {
        let kind = self.gradients.kind();
        let flat = memory::scope(MemoryKind::Gradient, || {
            zeros_flat(&self.gradient_shard, self.layout.padded(), kind)
        })?;
        FlatGrads::new(
            flat,
            &self.layout,
            self.grads.leaves(),
            kind == self.full.kind(),
        )
    }

    /// Whether earlier passes have left gradients whose reduction is deferred.
    pub(super) fn has_deferred_grads(&self) -> bool {
        self.deferred.is_some()
    }

    /// Ends a pass that does not reduce.
    pub(super) fn end_pass(&mut self) {
        self.grads.begin_pass();
    }

    /// Sets missing gradients to zero, and returns the names of their parameters.
    pub(super) fn fill_missing(&mut self, pool: &mut Pool) -> Result<Vec<String>> {
        if self.deferred.is_some() {
            // Deferred gradients start as zeros.
            let members = self.grads.leaves().enumerate();
            let missing = members.filter(|(number, _)| !self.deferred_members.contains(number));
            return Ok(missing.map(|(_, (name, _))| name.to_owned()).collect());
        }
        self.allocate_gradients(pool)?;
        let missing = self.grads.missing();
        self.grads.zero_missing()?;
        self.grads.begin_pass();
        Ok(missing)
    }

    /// Starts to reduce-scatter the flat gradient. With `accumulate`, the result stays in the flat gradient until
    /// [`Self::wait_for_reduce`] adds it to the gradient shard of earlier passes.
    pub(super) fn reduce_grads(
        &self,
        comm: &ShardComm,
        op: ReduceOp,
        accumulate: bool,
        pool: &mut Pool,
    ) -> Result<ReduceScatter> {
        if self.grads.flat().kind() != self.gradients.kind() {
            pool.acquire(&self.gradients)?;
            let accumulated = self.grads.flat();
            tch::no_grad(|| self.gradients.shallow_clone().f_copy_(accumulated))?;
        }
        let out = if accumulate {
            chunk_of(self.reduce_input(), &self.layout, self.index)?
        } else {
            self.gradient_shard.shallow_clone()
        };
        let tensors = (&out, self.reduce_input());
        let codec = comm.gradient_codec.as_ref();
        ReduceScatter::start(&comm.group, codec, tensors, op, Purpose::Gradient)
    }

    /// The flat gradient that is reduced.
    fn reduce_input(&self) -> &Tensor {
        self.deferred
            .as_ref()
            .map_or(&self.gradients, FlatGrads::flat)
    }

    /// Finishes a reduction: accumulates the gradient shard, and releases the memory of the flat gradient.
    pub(super) fn wait_for_reduce(
        &mut self,
        accumulate: bool,
        param_pool: Option<&mut Pool>,
        gradient_pool: &mut Pool,
    ) -> Result<()> {
        if accumulate {
            let reduced = chunk_of(self.reduce_input(), &self.layout, self.index)?;
            let _ = tch::no_grad(|| self.gradient_shard.shallow_clone().f_add_(&reduced))?;
        }
        if self.deferred.take().is_some() {
            return self.grads.clear();
        }
        if self.shares_memory()? {
            param_pool.map_or(Ok(()), |pool| self.reshard(pool))
        } else if self.owns_gradient_memory() {
            Ok(())
        } else {
            gradient_pool.release(&self.gradients)
        }
    }

    /// Whether the gathered parameters can be released as soon as the unit's backward has ended.
    pub(super) fn is_done_after_backward(&self) -> Result<bool> {
        Ok(self.deferred.is_some() || !self.shares_memory()?)
    }

    /// This rank's shard of the reduced gradients.
    pub(super) fn gradient_shard(&self) -> &Tensor {
        &self.gradient_shard
    }

    /// Clears the gradients of all leaves.
    pub(super) fn clear_gradients(&mut self) -> Result<()> {
        self.deferred_members.clear();
        self.grads.clear()
    }
}

/// Allocates the tensors of a unit, as its ZeRO stage needs them.
struct Allocation<'a> {
    like: &'a Tensor,
    layout: &'a FlatParam,
    index: usize,
    stage: Stage,
    kinds: Kinds,
}

impl Allocation<'_> {
    /// The flat parameter; in stage 3 its memory comes from the pool.
    fn full(&self) -> Result<Tensor> {
        match self.stage {
            Stage::Parameters => self.without_storage(self.kinds.param),
            _ => self.zeros(
                self.layout.padded(),
                self.kinds.param,
                MemoryKind::Parameter,
            ),
        }
    }

    /// This rank's master shard, and its parameter shard.
    fn shards(&self, full: &Tensor) -> Result<(Tensor, Tensor)> {
        let chunk = self.layout.chunk();
        let param_shard = match self.stage {
            Stage::Parameters => self.zeros(chunk, self.kinds.param, MemoryKind::Parameter)?,
            _ => chunk_of(full, self.layout, self.index)?,
        };
        let master = if self.kinds.master == self.kinds.param {
            param_shard.shallow_clone()
        } else {
            self.zeros(chunk, self.kinds.master, MemoryKind::Optimizer)?
        };
        Ok((master, param_shard))
    }

    /// The flat gradient that is reduced and, in stage 1, the one in which autograd accumulates.
    fn gradients(&self, full: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let is_same = self.kinds.param == self.kinds.reduce;
        Ok(match (self.stage, is_same) {
            (Stage::OptimizerStates, _) => {
                let accum =
                    self.zeros(self.layout.padded(), self.kinds.param, MemoryKind::Gradient)?;
                if is_same {
                    (accum.shallow_clone(), Some(accum))
                } else {
                    (self.without_storage(self.kinds.reduce)?, Some(accum))
                }
            }
            // A parameter is no longer needed once its gradient is complete, so the gradient reuses its memory.
            (Stage::Parameters, true) => (full.shallow_clone(), None),
            _ => (self.without_storage(self.kinds.reduce)?, None),
        })
    }

    /// This rank's shard of the reduced gradients.
    fn gradient_shard(&self, gradients: &Tensor) -> Result<Tensor> {
        match (self.stage, self.kinds.param == self.kinds.reduce) {
            (Stage::OptimizerStates, true) => chunk_of(gradients, self.layout, self.index),
            _ => self.zeros(self.layout.chunk(), self.kinds.reduce, MemoryKind::Gradient),
        }
    }

    fn zeros(&self, length: usize, kind: Kind, memory_kind: MemoryKind) -> Result<Tensor> {
        memory::scope(memory_kind, || zeros_flat(self.like, length, kind))
    }

    fn without_storage(&self, kind: Kind) -> Result<Tensor> {
        without_storage(self.like, self.layout.padded(), kind)
    }
}

/// An error of a parameter as one of this module.
fn of_nn(error: trainyard_nn::NnError) -> TorchError {
    TorchError::Other(error.to_string())
}

fn chunk_of(flat: &Tensor, layout: &FlatParam, index: usize) -> Result<Tensor> {
    let length = layout.chunk() as i64;
    Ok(flat.f_narrow(0, index as i64 * length, length)?)
}

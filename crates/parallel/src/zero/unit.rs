//! One unit of a sharded model: its tensors, and what may be done to them.

use tch::{Kind, Tensor};
use trainyard_mesh::Placement;
use trainyard_nn::Parameter;
use trainyard_torch::{Group, ReduceOp, Result, Work, autograd, memory, storage};
use trainyard_trace::{MemoryKind, Purpose};

use super::blank::{blank, shell};
use super::kept::Kept;
use super::pool::Pool;
use super::{Row, Stage};
use crate::offload::Staged;

/// The types of one unit's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kinds {
    pub master: Kind,
    pub param: Kind,
    pub reduce: Kind,
}

/// A parameter of the unit.
struct Member {
    name: String,
    /// What layers compute with: it stands on the gathered row.
    leaf: Tensor,
    /// Where its gradient is put.
    gradient: Tensor,
    is_ready: bool,
    /// Whether a gradient was held for later in this step.
    was_held: bool,
}

/// Whether the row is there.
enum Status {
    Released,
    /// On its way, from a chunk that may be off the shelf for it.
    Gathering(Box<(Work, Option<Staged>)>),
    Gathered,
}

/// A unit's row: gathered when needed, otherwise this rank's chunk of it.
pub(super) struct ShardedUnit {
    row: Row,
    index: usize,
    members: Vec<Member>,
    status: Status,
    /// The whole row, in the type layers compute in.
    full: Tensor,
    /// This rank's chunk, in the optimiser's type.
    master: Tensor,
    /// This rank's chunk as it is sent; the master itself where types are equal.
    sent: Tensor,
    /// How often the master had changed when `sent` was last made from it.
    version: i64,
    /// The row of gradients as it is reduced.
    gradients: Tensor,
    /// Where autograd's gradients add up before they are reduced, in stage 1.
    accumulated: Option<Tensor>,
    /// Gradients that several passes leave to be reduced together, in stages 2 and 3.
    kept: Option<Kept>,
    /// This rank's chunk of the reduced gradients.
    gradient_shard: Tensor,
    /// Whether the row's memory is the unit's own and not lent.
    owns_memory: bool,
    /// Whether another unit computes with this one's parameters too.
    pub is_lent: bool,
}

impl ShardedUnit {
    /// Cuts the parameters of a unit, and lets go of what other ranks hold. Returns this rank's
    /// shards, each under its parameter's name.
    pub(super) fn new(
        parameters: &[Parameter],
        group: &Group,
        stage: Stage,
        kinds: Kinds,
    ) -> Result<(ShardedUnit, Vec<Parameter>)> {
        let lengths = parameters.iter().map(|p| p.tensor().numel()).collect();
        let row = Row::new(lengths, group.size());
        let like = parameters[0].tensor().f_detach()?;
        let memory = Memory {
            like: &like,
            row: &row,
            index: group.index(),
            stage,
            kinds,
        };
        let full = memory.full()?;
        let (master, sent) = memory.chunks(&full)?;
        let (gradients, accumulated) = memory.gradients(&full)?;
        let gradient_shard = memory.gradient_shard(&gradients)?;
        let mut unit = ShardedUnit {
            index: group.index(),
            members: Vec::with_capacity(parameters.len()),
            status: Status::Released,
            full,
            sent,
            version: -1,
            gradients,
            accumulated,
            kept: None,
            gradient_shard,
            owns_memory: false,
            is_lent: false,
            master,
            row,
        };
        let mut shards = Vec::with_capacity(parameters.len());
        for (member, parameter) in parameters.iter().enumerate() {
            shards.push(unit.adopt(member, parameter, stage)?);
        }
        if stage != Stage::Parameters {
            // Every rank began with the whole: nothing has to travel yet.
            unit.refresh()?;
            unit.status = Status::Gathered;
        }
        Ok((unit, shards))
    }

    /// Keeps this rank's part of a parameter, and makes its leaf stand on the row.
    fn adopt(&mut self, member: usize, parameter: &Parameter, stage: Stage) -> Result<Parameter> {
        let leaf = parameter.tensor();
        let (part, at) = self.row.held(member, self.index);
        let (start, length) = (part.start as i64, part.len() as i64);
        let held = self.master.f_narrow(0, at as i64, length)?;
        let whole = self.view(&self.full, member, leaf)?;
        tch::no_grad(|| -> Result<()> {
            if stage != Stage::Parameters {
                whole.shallow_clone().f_copy_(leaf)?;
            }
            let values = leaf.f_view(-1i64)?.f_narrow(0, start, length)?;
            held.shallow_clone().f_copy_(&values)?;
            Ok(())
        })?;
        let gradient_row = self.accumulated.as_ref().unwrap_or(&self.gradients);
        let gradient = self.view(gradient_row, member, leaf)?;
        storage::rebind(leaf, &whole)?;
        self.members.push(Member {
            name: parameter.name().to_owned(),
            leaf: leaf.shallow_clone(),
            gradient,
            is_ready: false,
            was_held: false,
        });
        let packed = Placement::Packed(self.row.packed(member));
        let layout = super::shard_axes_of(&parameter.layout())
            .iter()
            .fold(parameter.layout(), |layout, axis| layout.with(axis, packed));
        let held = held.f_detach()?.f_set_requires_grad(true)?;
        parameter
            .shard(held, layout)
            .map_err(|e| trainyard_torch::TorchError::Other(e.to_string()))
    }

    /// A parameter's place in a row, in the parameter's shape.
    fn view(&self, row: &Tensor, member: usize, like: &Tensor) -> Result<Tensor> {
        let place = self.row.place(member);
        let flat = row.f_narrow(0, place.start as i64, place.len() as i64)?;
        Ok(flat.f_view(&like.size()[..])?)
    }

    /// Every leaf, by member.
    pub(super) fn leaves(&self) -> impl Iterator<Item = &Tensor> {
        self.members.iter().map(|member| &member.leaf)
    }

    /// This rank's part of a member's gradient.
    pub(super) fn gradient_of(&self, member: usize) -> Result<Tensor> {
        let place = self.place_in_chunk(member);
        let (start, length) = (place.start as i64, place.len() as i64);
        Ok(self.gradient_shard.f_narrow(0, start, length)?)
    }

    /// Where a member lies in this rank's chunk.
    pub(super) fn place_in_chunk(&self, member: usize) -> std::ops::Range<usize> {
        let (part, at) = self.row.held(member, self.index);
        at..at + part.len()
    }

    /// Elements of parameters in this rank's chunk, without padding.
    pub(super) fn num_held(&self) -> u64 {
        let places = (0..self.members.len()).map(|member| self.place_in_chunk(member));
        places.map(|place| place.len() as u64).sum()
    }

    /// This rank's chunk as it is sent.
    pub(super) fn sent(&self) -> &Tensor {
        &self.sent
    }

    /// This rank's chunk in the optimiser's type, where that is not what is sent.
    pub(super) fn master(&self) -> Option<&Tensor> {
        (self.master.kind() != self.sent.kind()).then_some(&self.master)
    }

    /// Elements of the row with its padding.
    pub(super) fn padded(&self) -> usize {
        self.row.padded()
    }

    /// Whether the row that is reduced has memory of its own, which no other unit waits for.
    pub(super) fn keeps_gradients(&self) -> bool {
        let kept = self.accumulated.as_ref().map(Tensor::kind);
        kept == Some(self.gradients.kind()) || self.kept.is_some()
    }

    /// Whether gradients overwrite the gathered parameters.
    fn shares_memory(&self) -> Result<bool> {
        storage::is_shared(&self.full, &self.gradients)
    }

    /// Whether the optimiser has changed the master since it was last looked at. If so, what is
    /// sent is made anew.
    pub(super) fn refresh(&mut self) -> Result<bool> {
        let version = storage::version(&self.master)?;
        if version == self.version {
            return Ok(false);
        }
        if self.sent.kind() != self.master.kind() {
            tch::no_grad(|| self.sent.shallow_clone().f_copy_(&self.master))?;
        }
        // Read again: where both are the same memory, copying would have counted too.
        self.version = storage::version(&self.master)?;
        Ok(true)
    }

    /// Takes memory for a row that will stay for long: no more than it needs.
    pub(super) fn take_memory(&mut self) -> Result<()> {
        self.owns_memory = true;
        memory::scope(MemoryKind::Parameter, || storage::restore(&self.full))
    }

    /// Borrows memory for a row that will go soon.
    pub(super) fn borrow_memory(&mut self, pool: &mut Pool) -> Result<()> {
        pool.lend(&self.full)
    }

    /// Starts to gather the row. `shelved` is what is sent, if that is kept in a file.
    pub(super) fn start_gather(&mut self, group: &Group, shelved: Option<Staged>) -> Result<()> {
        let sent = shelved.as_ref().map_or(&self.sent, |staged| &staged[0]);
        let work = group.all_gather(&self.full, sent, Purpose::Parameter)?;
        self.status = Status::Gathering(Box::new((work, shelved)));
        Ok(())
    }

    /// Whether the row is neither there nor on its way.
    pub(super) fn is_released(&self) -> bool {
        matches!(self.status, Status::Released)
    }

    /// Waits until the row is there.
    pub(super) fn finish_gather(&mut self) -> Result<()> {
        let status = std::mem::replace(&mut self.status, Status::Gathered);
        if let Status::Gathering(under_way) = status {
            let (work, _shelved) = *under_way;
            work.wait()?;
        }
        Ok(())
    }

    /// Gives the row's memory back.
    pub(super) fn release(&mut self, pool: &mut Pool) -> Result<()> {
        if matches!(self.status, Status::Released) {
            return Ok(());
        }
        self.finish_gather()?;
        self.status = Status::Released;
        match std::mem::take(&mut self.owns_memory) {
            true => storage::release(&self.full),
            false => pool.take_back(&self.full),
        }
    }

    /// The row is to be gathered again, into memory that stays.
    pub(super) fn outdate(&mut self) -> Result<()> {
        self.finish_gather()?;
        self.status = Status::Released;
        Ok(())
    }

    /// Puts a member's gradient where it is reduced from, or adds up.
    pub(super) fn keep_gradient(&mut self, number: usize, pool: &mut Pool) -> Result<()> {
        let is_first = self.members.iter().all(|member| !member.is_ready);
        if is_first && self.accumulated.is_none() && !self.shares_memory()? {
            pool.lend(&self.gradients)?;
        }
        let member = &mut self.members[number];
        let came_before = std::mem::replace(&mut member.is_ready, true);
        let gradient = member.leaf.f_grad()?;
        if !gradient.defined() || storage::is_shared(&gradient, &member.gradient)? {
            return Ok(());
        }
        let mut place = member.gradient.shallow_clone();
        // Twice in one pass, when parts of the unit are recomputed that share the parameter.
        tch::no_grad(|| match came_before {
            true => place.f_add_(&gradient).map(drop),
            false => place.f_copy_(&gradient),
        })?;
        match self.accumulated {
            Some(_) => autograd::set_grad(&member.leaf, &member.gradient),
            None => autograd::clear_grad(&member.leaf),
        }
    }

    /// Adds a member's gradient to those that are reduced later.
    pub(super) fn hold_gradient(&mut self, number: usize) -> Result<()> {
        let mut kept = match self.kept.take() {
            Some(kept) => kept,
            None => self.new_kept()?,
        };
        kept.add(number, &self.members[number].leaf)?;
        self.members[number].was_held = true;
        self.kept = Some(kept);
        Ok(())
    }

    fn new_kept(&self) -> Result<Kept> {
        let kind = self.gradients.kind();
        let row = memory::scope(MemoryKind::Gradient, || {
            blank(&self.gradient_shard, self.row.padded(), kind)
        })?;
        let members = self.members.iter().enumerate();
        let places = members.map(|(number, member)| self.view(&row, number, &member.leaf));
        let places = places.collect::<Result<Vec<_>>>()?;
        Ok(Kept::new(row, places))
    }

    /// Whether earlier passes have left gradients to be reduced.
    pub(super) fn is_holding(&self) -> bool {
        self.kept.is_some()
    }

    /// The pass is over; what it left waits.
    pub(super) fn end_pass(&mut self) {
        for member in &mut self.members {
            member.is_ready = false;
        }
    }

    /// Zero stands for gradients that did not come; returns whose.
    pub(super) fn fill_missing(&mut self, pool: &mut Pool) -> Result<Vec<String>> {
        if self.kept.is_some() {
            // Zeros stand there already; what was reduced before is not missed.
            let missing = self.members.iter().filter(|member| !member.was_held);
            return Ok(missing.map(|member| member.name.clone()).collect());
        }
        let any = self.members.iter().any(|member| member.is_ready);
        if !any && self.accumulated.is_none() && !self.shares_memory()? {
            pool.lend(&self.gradients)?;
        }
        let mut missing = Vec::new();
        for member in &mut self.members {
            let is_kept = self.accumulated.is_some() && member.leaf.f_grad()?.defined();
            if !std::mem::take(&mut member.is_ready) && !is_kept {
                missing.push(member.name.clone());
                let _ = tch::no_grad(|| member.gradient.shallow_clone().f_zero_())?;
            }
        }
        Ok(missing)
    }

    /// Starts to reduce the row of gradients. With `adds`, this rank's chunk of it stays in the row
    /// until [`Self::finish_reduce`] adds it to what earlier passes left.
    pub(super) fn start_reduce(
        &self,
        group: &Group,
        op: ReduceOp,
        adds: bool,
        pool: &mut Pool,
    ) -> Result<Work> {
        if let Some(kept) = &self.accumulated
            && kept.kind() != self.gradients.kind()
        {
            pool.lend(&self.gradients)?;
            tch::no_grad(|| self.gradients.shallow_clone().f_copy_(kept))?;
        }
        let out = match adds {
            true => chunk_of(self.reduced_row(), &self.row, self.index)?,
            false => self.gradient_shard.shallow_clone(),
        };
        group.reduce_scatter(&out, self.reduced_row(), op, Purpose::Gradient)
    }

    fn reduced_row(&self) -> &Tensor {
        self.kept.as_ref().map_or(&self.gradients, |kept| &kept.row)
    }

    /// Puts the reduced chunk where it belongs, and gives the row's memory back.
    pub(super) fn finish_reduce(
        &mut self,
        adds: bool,
        param_pool: Option<&mut Pool>,
        gradient_pool: &mut Pool,
    ) -> Result<()> {
        if adds {
            let own = chunk_of(self.reduced_row(), &self.row, self.index)?;
            let _ = tch::no_grad(|| self.gradient_shard.shallow_clone().f_add_(&own))?;
        }
        if self.kept.take().is_some() {
            return self.leaves().try_for_each(autograd::clear_grad);
        }
        match (self.shares_memory()?, &self.accumulated) {
            (true, None) => param_pool.map_or(Ok(()), |pool| self.release(pool)),
            (_, Some(kept)) if storage::is_shared(kept, &self.gradients)? => Ok(()),
            _ => gradient_pool.take_back(&self.gradients),
        }
    }

    /// Whether the gathered parameters may go as soon as the unit's backward has ended.
    pub(super) fn is_done_after_backward(&self) -> Result<bool> {
        Ok(self.kept.is_some() || !self.shares_memory()?)
    }

    /// This rank's chunk of the reduced gradients.
    pub(super) fn gradient_shard(&self) -> &Tensor {
        &self.gradient_shard
    }

    /// Leaves the leaves without gradients.
    pub(super) fn clear_gradients(&mut self) -> Result<()> {
        for member in &mut self.members {
            member.was_held = false;
        }
        self.leaves().try_for_each(autograd::clear_grad)
    }
}

/// Takes the memory of a unit: what each stage keeps, and in which type.
struct Memory<'a> {
    like: &'a Tensor,
    row: &'a Row,
    index: usize,
    stage: Stage,
    kinds: Kinds,
}

impl Memory<'_> {
    /// The whole row; in stage 3 its memory is lent.
    fn full(&self) -> Result<Tensor> {
        match self.stage {
            Stage::Parameters => self.shell(self.kinds.param),
            _ => self.taken(self.row.padded(), self.kinds.param, MemoryKind::Parameter),
        }
    }

    /// This rank's chunk as the optimiser changes it, and as it is sent.
    fn chunks(&self, full: &Tensor) -> Result<(Tensor, Tensor)> {
        let chunk = self.row.chunk();
        let sent = match self.stage {
            Stage::Parameters => self.taken(chunk, self.kinds.param, MemoryKind::Parameter)?,
            _ => chunk_of(full, self.row, self.index)?,
        };
        let master = match self.kinds.master == self.kinds.param {
            true => sent.shallow_clone(),
            false => self.taken(chunk, self.kinds.master, MemoryKind::Optimizer)?,
        };
        Ok((master, sent))
    }

    /// The row that is reduced and, in stage 1, the one in which gradients add up.
    fn gradients(&self, full: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let is_same = self.kinds.param == self.kinds.reduce;
        Ok(match (self.stage, is_same) {
            (Stage::OptimizerStates, _) => {
                let kept = self.taken(self.row.padded(), self.kinds.param, MemoryKind::Gradient)?;
                match is_same {
                    true => (kept.shallow_clone(), Some(kept)),
                    false => (self.shell(self.kinds.reduce)?, Some(kept)),
                }
            }
            // A parameter is not needed any more once its gradient is there: the gradient takes
            // its place.
            (Stage::Parameters, true) => (full.shallow_clone(), None),
            _ => (self.shell(self.kinds.reduce)?, None),
        })
    }

    /// This rank's chunk of the reduced gradients.
    fn gradient_shard(&self, gradients: &Tensor) -> Result<Tensor> {
        match (self.stage, self.kinds.param == self.kinds.reduce) {
            (Stage::OptimizerStates, true) => chunk_of(gradients, self.row, self.index),
            _ => self.taken(self.row.chunk(), self.kinds.reduce, MemoryKind::Gradient),
        }
    }

    fn taken(&self, length: usize, kind: Kind, what: MemoryKind) -> Result<Tensor> {
        memory::scope(what, || blank(self.like, length, kind))
    }

    fn shell(&self, kind: Kind) -> Result<Tensor> {
        shell(self.like, self.row.padded(), kind)
    }
}

fn chunk_of(whole: &Tensor, row: &Row, index: usize) -> Result<Tensor> {
    let length = row.chunk() as i64;
    Ok(whole.f_narrow(0, index as i64 * length, length)?)
}

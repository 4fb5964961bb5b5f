//! All units of a sharded model, and what happens to them during a step.

use std::collections::VecDeque;

use tch::Tensor;
use trainyard_torch::{Group, ReduceOp, Result, TorchError, Work};
use trainyard_trace::Purpose;

use super::Stage;
use super::offload::States;
use super::pool::Pool;
use super::schedule::Schedule;
use super::shelf::{OffloadOptions, Shelf};
use super::unit::ShardedUnit;
use crate::offload::{Counters, Staged};
use crate::strategy::Sync;

/// How the shards of a model communicate.
pub(super) struct Wiring {
    pub stage: Stage,
    pub schedule: Schedule,
    pub op: ReduceOp,
    pub shard_group: Group,
    pub replicate_group: Group,
}

/// Gradients of a unit on their way.
struct Reducing {
    unit: usize,
    work: Work,
    adds: bool,
}

/// The units, the memory they share, and how far the present pass has come.
pub(super) struct Shards {
    wiring: Wiring,
    /// One per unit of the model; none where a unit has nothing to train.
    units: Vec<Option<ShardedUnit>>,
    param_pool: Pool,
    gradient_pool: Pool,
    /// Where what is sent is kept, if not in memory.
    shelf: Option<Shelf>,
    reducing: VecDeque<Reducing>,
    replicating: Vec<Work>,
    sync: Sync,
    /// Whether rows stay gathered from pass to pass.
    is_unsharded: bool,
    /// Whether the gradient shards hold what earlier passes of this step left.
    holds_gradients: bool,
    /// Whether any were reduced in this step.
    has_reduced: bool,
    /// Whether that was left to the end of all passes.
    reduces_late: bool,
    missing: Vec<String>,
}

impl Shards {
    /// `like` tells the device; the pools fit the longest row.
    pub(super) fn new(
        wiring: Wiring,
        units: Vec<Option<ShardedUnit>>,
        like_param: &Tensor,
        like_gradient: &Tensor,
    ) -> Shards {
        let longest = units.iter().flatten().map(ShardedUnit::padded).max();
        let longest = longest.unwrap_or(0);
        Shards {
            wiring,
            units,
            param_pool: Pool::new(like_param, longest),
            gradient_pool: Pool::new(like_gradient, longest),
            shelf: None,
            reducing: VecDeque::new(),
            replicating: Vec::new(),
            sync: Sync::Reduce,
            is_unsharded: false,
            holds_gradients: false,
            has_reduced: false,
            reduces_late: false,
            missing: Vec::new(),
        }
    }

    pub(super) fn units(&self) -> impl Iterator<Item = (usize, &ShardedUnit)> {
        let units = self.units.iter().enumerate();
        units.filter_map(|(index, unit)| Some((index, unit.as_ref()?)))
    }

    /// A forward pass begins: what the optimiser has changed since the last one is sent anew. Rows
    /// that always stay are all gathered now, in the order in which they will be needed.
    pub(super) fn begin_forward(&mut self) -> Result<()> {
        if self.num_allowed() != usize::MAX {
            // Gradients on their way lie where parameters must be.
            self.finish_reducing(0)?;
        }
        if self.shelf.is_some() {
            // What is sent was made anew when the optimiser changed it.
            return Ok(());
        }
        let keeps = self.wiring.stage != Stage::Parameters;
        for index in 0..self.units.len() {
            let Some(unit) = &mut self.units[index] else {
                continue;
            };
            if !unit.refresh()? {
                continue;
            }
            match keeps {
                true => unit.outdate()?,
                false => unit.release(&mut self.param_pool)?,
            }
            if keeps {
                self.start_gather(index)?;
                if !self.wiring.schedule.overlap {
                    self.finish_gather(index)?;
                }
            }
        }
        Ok(())
    }

    /// The optimiser has changed a unit: what stays gathered is sent anew at once, while the optimiser
    /// goes on with the next unit.
    pub(super) fn publish(&mut self, index: usize) -> Result<()> {
        let is_kept = self.wiring.stage != Stage::Parameters;
        let Some(unit) = self.units[index].as_mut().filter(|_| is_kept) else {
            return Ok(());
        };
        if !unit.refresh()? {
            return Ok(());
        }
        unit.outdate()?;
        self.start_gather(index)?;
        match self.wiring.schedule.overlap {
            true => Ok(()),
            false => self.finish_gather(index),
        }
    }

    /// Waits for every row that is on its way.
    pub(super) fn settle(&mut self) -> Result<()> {
        let mut units = self.units.iter_mut().flatten();
        units
            .by_ref()
            .filter(|unit| !unit.is_released())
            .try_for_each(ShardedUnit::finish_gather)
    }

    /// The unit's parameters are needed now, and those of others soon.
    pub(super) fn before_forward(&mut self, index: usize) -> Result<()> {
        self.need(index, self.wiring.schedule.ahead(index, self.units.len()))
    }

    /// The unit has run.
    pub(super) fn after_forward(&mut self, index: usize, is_training: bool) -> Result<()> {
        let is_last = index + 1 == self.units.len();
        if is_last && !is_training {
            return (0..self.units.len()).try_for_each(|index| self.release(index));
        }
        let is_lent = self.units[index].as_ref().is_some_and(|unit| unit.is_lent);
        if !is_lent && self.wiring.schedule.releases(is_last, is_training) {
            self.release(index)?;
        }
        if is_last {
            // Backward comes this way again: what it needs first travels while the loss is computed.
            let mut soon = self.wiring.schedule.behind(index);
            return soon.try_for_each(|index| self.start_gather(index));
        }
        Ok(())
    }

    /// A backward pass begins.
    pub(super) fn begin_backward(&mut self, sync: Sync) -> Result<()> {
        // What a pass that failed left under way must not be taken for this one's.
        self.finish_reducing(0)?;
        self.holds_gradients |= self.has_reduced;
        self.sync = sync;
        self.missing.clear();
        Ok(())
    }

    /// The unit's parameters are needed again, from the last unit to the first.
    pub(super) fn before_backward(&mut self, index: usize) -> Result<()> {
        self.need(index, self.wiring.schedule.behind(index))
    }

    /// A parameter's gradient of this pass is complete.
    pub(super) fn gradient_ready(&mut self, index: usize, member: usize) -> Result<()> {
        let keeps = self.sync == Sync::Keep;
        let has_rows = self.wiring.stage == Stage::OptimizerStates;
        match &mut self.units[index] {
            Some(unit) if !has_rows && (keeps || unit.is_holding()) => unit.hold_gradient(member),
            Some(unit) => unit.keep_gradient(member, &mut self.gradient_pool),
            None => Ok(()),
        }
    }

    /// The unit's gradients leave; those of the unit before must have arrived.
    pub(super) fn after_backward(&mut self, index: usize) -> Result<()> {
        let Some(unit) = &mut self.units[index] else {
            return Ok(());
        };
        if self.sync == Sync::Keep {
            unit.end_pass();
            return self.release(index);
        }
        let missing = unit.fill_missing(&mut self.gradient_pool)?;
        self.missing.extend(missing);
        if unit.is_done_after_backward()? {
            self.release(index)?;
        }
        match (self.wiring.stage, self.sync) {
            (Stage::OptimizerStates, Sync::Accumulate) => Ok(()),
            _ => self.start_reduce(index),
        }
    }

    /// Begins to reduce what several passes have left. `sync` tells whether this is the last of it.
    pub(super) fn start_reduce_all(&mut self, sync: Sync) -> Result<()> {
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
        let adds = self.holds_gradients && self.wiring.stage != Stage::OptimizerStates;
        let Some(unit) = &self.units[index] else {
            return Ok(());
        };
        let work = unit.start_reduce(
            &self.wiring.shard_group,
            self.wiring.op,
            adds,
            &mut self.gradient_pool,
        )?;
        self.reducing.push_back(Reducing {
            unit: index,
            work,
            adds,
        });
        self.finish_reducing(self.num_allowed())
    }

    /// How many reductions may be under way while backward goes on: as many as there are where
    /// gradients have memory of their own, else one, whose memory the next unit does not need.
    fn num_allowed(&self) -> usize {
        let mut units = self.units.iter().flatten();
        match self.wiring.schedule.overlap {
            false => 0,
            true if units.all(ShardedUnit::keeps_gradients) => usize::MAX,
            true => 1,
        }
    }

    /// Everything is waited for. Returns what became of the gradients, and parameters that had none.
    pub(super) fn finish(&mut self) -> Result<(Sync, Vec<String>)> {
        self.finish_reducing(0)?;
        if std::mem::take(&mut self.reduces_late) {
            // Passes come first in the next step too, and need the memory more.
            self.gradient_pool.empty();
        }
        for work in std::mem::take(&mut self.replicating) {
            work.wait()?;
        }
        self.holds_gradients |= self.has_reduced;
        Ok((self.sync, std::mem::take(&mut self.missing)))
    }

    /// Gathers all rows, to stay.
    pub(super) fn unshard(&mut self) -> Result<()> {
        self.begin_forward()?;
        self.is_unsharded = true;
        (0..self.units.len()).try_for_each(|index| self.start_gather(index))
    }

    /// Lets all rows go.
    pub(super) fn reshard(&mut self) -> Result<()> {
        self.is_unsharded = false;
        (0..self.units.len()).try_for_each(|index| self.release(index))
    }

    /// The step is over.
    pub(super) fn clear_gradients(&mut self) -> Result<()> {
        self.holds_gradients = false;
        self.has_reduced = false;
        let mut units = self.units.iter_mut().flatten();
        units.try_for_each(ShardedUnit::clear_gradients)
    }

    fn need(&mut self, index: usize, soon: impl Iterator<Item = usize>) -> Result<()> {
        self.start_gather(index)?;
        let mut last = index;
        for index in soon {
            self.start_gather(index)?;
            last = index;
        }
        if let Some(next) = self.wiring.schedule.after(index, last, self.units.len()) {
            self.read_ahead(next)?;
        }
        self.finish_gather(index)
    }

    fn start_gather(&mut self, index: usize) -> Result<()> {
        let Some(unit) = self.units[index].as_mut().filter(|u| u.is_released()) else {
            return Ok(());
        };
        match self.wiring.stage {
            Stage::Parameters if self.is_unsharded => unit.take_memory()?,
            Stage::Parameters => unit.borrow_memory(&mut self.param_pool)?,
            _ => {}
        }
        let shelved = self.shelf.as_mut().map(|shelf| shelf.take(index));
        let shelved = shelved.transpose().map_err(told)?;
        unit.start_gather(&self.wiring.shard_group, shelved)
    }

    /// Keeps what is sent in a file from now on. Returns where the optimiser's states will be.
    pub(super) fn offload(&mut self, options: &OffloadOptions) -> crate::Result<States> {
        // What will be sent is made from the masters before they go.
        for unit in self.units.iter_mut().flatten() {
            unit.refresh()?;
        }
        let of_units = |part: fn(&ShardedUnit) -> Option<&Tensor>| -> Vec<Option<Tensor>> {
            let parts = self.units.iter().map(|unit| part(unit.as_ref()?));
            parts.map(|part| part.map(Tensor::shallow_clone)).collect()
        };
        let (sent, masters) = (
            of_units(|unit| Some(unit.sent())),
            of_units(ShardedUnit::master),
        );
        // As many are off the shelf at once as are gathered ahead.
        let options = OffloadOptions {
            num_buffers: options.num_buffers + self.wiring.schedule.prefetch,
            ..options.clone()
        };
        self.shelf = Some(Shelf::filled(&options, "parameters", &sent)?);
        States::new(options, &masters)
    }

    /// Asks for a unit's parameters before they are needed.
    pub(super) fn read_ahead(&mut self, index: usize) -> Result<()> {
        match (&mut self.shelf, &self.units[index]) {
            (Some(shelf), Some(_)) => shelf.read_ahead(index).map_err(told),
            _ => Ok(()),
        }
    }

    /// A unit's chunk off the shelf, to be changed.
    pub(super) fn take_shard(&mut self, index: usize) -> crate::Result<Staged> {
        match &mut self.shelf {
            Some(shelf) => shelf.take(index),
            None => Err(crate::ParallelError::OffloadNeedsStage3),
        }
    }

    /// Writes a unit's chunk behind.
    pub(super) fn put_shard(&mut self, staged: Staged) -> crate::Result<()> {
        self.shelf
            .as_mut()
            .map_or(Ok(()), |shelf| shelf.write_behind(staged))
    }

    pub(super) fn offload_counters(&self) -> Option<Counters> {
        self.shelf.as_ref().map(Shelf::counters)
    }

    fn finish_gather(&mut self, index: usize) -> Result<()> {
        match &mut self.units[index] {
            Some(unit) => unit.finish_gather(),
            None => Ok(()),
        }
    }

    fn release(&mut self, index: usize) -> Result<()> {
        match (&mut self.units[index], self.wiring.stage) {
            (Some(unit), Stage::Parameters) if !self.is_unsharded => {
                unit.release(&mut self.param_pool)
            }
            _ => Ok(()),
        }
    }

    /// Waits until no more than `allowed` reductions are under way.
    fn finish_reducing(&mut self, allowed: usize) -> Result<()> {
        while self.reducing.len() > allowed
            && let Some(reducing) = self.reducing.pop_front()
        {
            reducing.work.wait()?;
            let Some(unit) = &mut self.units[reducing.unit] else {
                continue;
            };
            let param_pool = match self.wiring.stage {
                Stage::Parameters => Some(&mut self.param_pool),
                _ => None,
            };
            unit.finish_reduce(reducing.adds, param_pool, &mut self.gradient_pool)?;
            // Copies of the model meet once a step, over the shards alone.
            if self.sync == Sync::Reduce && self.wiring.replicate_group.size() > 1 {
                self.replicating
                    .push(self.wiring.replicate_group.all_reduce(
                        unit.gradient_shard(),
                        self.wiring.op,
                        Purpose::Gradient,
                    )?);
            }
        }
        Ok(())
    }
}

/// An error of offload, told from within a pass.
fn told(error: crate::ParallelError) -> TorchError {
    TorchError::Other(error.to_string())
}

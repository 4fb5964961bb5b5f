//! Optimizer states of a sharded model that are offloaded to files, and staged unit by unit for the optimizer step.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Mutex;

use tch::{Kind, Tensor};
use trainyard_nn::Parameter;

use super::fsdp_state::FsdpState;
use super::fully_shard::{Shard, step_alone};
use super::offload_file::{Loaded, OffloadFile, OffloadOptions, SwappedIn};
use crate::error::Result;
use crate::lock::lock;
use crate::offload::{Counters, Record};
use crate::strategy::OptimizerStep;

/// A sharded model's offloaded states.
pub(super) struct Offloaded(RefCell<OffloadedStates>);

impl Offloaded {
    pub(super) fn new(states: OffloadedStates) -> Offloaded {
        Offloaded(RefCell::new(states))
    }

    /// Steps the optimizer unit by unit. While one unit is updated, the next is read and the previous one written.
    pub(super) fn optimizer_step(
        &self,
        units: &[Vec<Shard>],
        state: &Mutex<FsdpState>,
        step: &mut OptimizerStep<'_>,
    ) -> Result<()> {
        let mut known = moments_by_parameter(step.optimizer);
        let is_first = known.is_empty();
        for (index, members) in units.iter().enumerate() {
            if members.is_empty() {
                continue;
            }
            if index + 1 < units.len() {
                self.0.borrow_mut().read_ahead(index + 1)?;
                lock(state).read_ahead(index + 1)?;
            }
            let moments = moments_of(members, &mut known);
            self.step_unit(index, members, &moments, state, step)?;
            if is_first {
                let moments = moments_of(members, &mut moments_by_parameter(step.optimizer));
                self.0
                    .borrow_mut()
                    .offload_moments(index, units, &moments)?;
            }
        }
        Ok(())
    }

    fn step_unit(
        &self,
        index: usize,
        members: &[Shard],
        moments: &[Tensor],
        state: &Mutex<FsdpState>,
        step: &mut OptimizerStep<'_>,
    ) -> Result<()> {
        let shard = lock(state).take_shard(index)?;
        let mut states = self.0.borrow_mut();
        let staged = states.take(index, members, &shard[0], moments)?;
        step_alone(members, step)?;
        if let Some(master) = staged.masters() {
            tch::no_grad(|| shard[0].shallow_clone().f_copy_(master))?;
        }
        states.put_back(staged)?;
        lock(state).put_shard(shard)
    }

    /// Visits every parameter while it is staged in memory.
    pub(super) fn with_parameters(
        &self,
        units: &[Vec<Shard>],
        state: &Mutex<FsdpState>,
        visitor: &mut dyn FnMut(&Parameter) -> Result<()>,
    ) -> Result<()> {
        for (index, members) in units.iter().enumerate() {
            if members.is_empty() {
                continue;
            }
            let shard = lock(state).take_shard(index)?;
            let mut states = self.0.borrow_mut();
            let staged = states.take(index, members, &shard[0], &[])?;
            members.iter().try_for_each(|m| visitor(&m.parameter))?;
            drop(staged);
        }
        Ok(())
    }

    /// The counters of each offload file.
    pub(super) fn counters(&self, state: &Mutex<FsdpState>) -> Vec<Counters> {
        let mut counters = self.0.borrow().counters();
        counters.extend(lock(state).offload_counters());
        counters
    }
}

/// Offloaded master weights and moments. [`FsdpState`] itself offloads the parameter shards that are gathered.
pub(super) struct OffloadedStates {
    options: OffloadOptions,
    /// Master weights, if they are not the parameter shards themselves.
    masters: Option<OffloadFile>,
    /// Moments; the file is created once the optimizer has allocated them.
    moments: Option<OffloadFile>,
}

/// One unit's states in staging buffers.
pub(super) struct StagedUnit {
    swapped_in: Vec<SwappedIn>,
    masters: Option<Loaded>,
    moments: Option<Loaded>,
}

impl StagedUnit {
    /// The unit's master weights, if they are not the parameter shard itself.
    pub(super) fn masters(&self) -> Option<&Tensor> {
        self.masters.as_ref().map(|staged| &staged[0])
    }
}

impl OffloadedStates {
    /// Offloads the master weights of all units; `None` if a unit has none.
    pub(super) fn new(
        options: OffloadOptions,
        masters: &[Option<Tensor>],
    ) -> Result<OffloadedStates> {
        let has_masters = masters.iter().any(Option::is_some);
        let offload = || OffloadFile::filled(&options, "masters", masters);
        Ok(OffloadedStates {
            masters: has_masters.then(offload).transpose()?,
            moments: None,
            options,
        })
    }

    /// Starts to read a unit's states.
    pub(super) fn read_ahead(&mut self, unit: usize) -> Result<()> {
        for file in [&mut self.masters, &mut self.moments].into_iter().flatten() {
            file.read_ahead(unit)?;
        }
        Ok(())
    }

    /// Stages a unit's master weights, and its `moments` if any are given. `shard` is what its parameters are bound
    /// to if there are no separate master weights.
    pub(super) fn take(
        &mut self,
        unit: usize,
        members: &[Shard],
        shard: &Tensor,
        moments: &[Tensor],
    ) -> Result<StagedUnit> {
        let masters = self.masters.as_mut().map(|s| s.take(unit)).transpose()?;
        let data = masters.as_ref().map_or(shard, |staged| &staged[0]);
        let mut swapped_in = Vec::new();
        for Shard {
            parameter,
            in_chunk,
            ..
        } in members
        {
            let data = data.f_narrow(0, in_chunk.start as i64, in_chunk.len() as i64)?;
            swapped_in.push(SwappedIn::new(parameter.tensor(), &data)?);
        }
        // A caller that does not use moments does not wait for them to be read.
        let wanted = self.moments.as_mut().filter(|_| !moments.is_empty());
        let staged = wanted.map(|file| file.take(unit)).transpose()?;
        for (state, buffer) in moments.iter().zip(staged.iter().flat_map(|s| s.iter())) {
            swapped_in.push(SwappedIn::new(state, buffer)?);
        }
        Ok(StagedUnit {
            swapped_in,
            masters,
            moments: staged,
        })
    }

    /// Writes a unit's states back in the background.
    pub(super) fn put_back(&mut self, unit: StagedUnit) -> Result<()> {
        drop(unit.swapped_in);
        let files = [
            (&mut self.masters, unit.masters),
            (&mut self.moments, unit.moments),
        ];
        for (file, staged) in files {
            if let (Some(file), Some(staged)) = (file, staged) {
                file.write_behind(staged)?;
            }
        }
        Ok(())
    }

    /// Offloads a unit's moments, which the optimizer has allocated in the unit's first step.
    pub(super) fn offload_moments(
        &mut self,
        unit: usize,
        units: &[Vec<Shard>],
        moments: &[Tensor],
    ) -> Result<()> {
        if self.moments.is_none() {
            let num_each = moments.len() / units[unit].len().max(1);
            let kind = moments.first().map_or(Kind::Float, Tensor::kind);
            let lengths = |shard: &Shard| std::iter::repeat_n(shard.in_chunk.len(), num_each);
            let record = |shards: &Vec<Shard>| Record::of(kind, shards.iter().flat_map(lengths));
            let records = units.iter().map(record).collect();
            self.moments = Some(OffloadFile::new(&self.options, "moments", records)?);
        }
        match &mut self.moments {
            Some(file) => file.put(unit, moments),
            None => Ok(()),
        }
    }

    /// The counters of each file.
    pub(super) fn counters(&self) -> Vec<Counters> {
        let files = [&self.masters, &self.moments];
        files
            .into_iter()
            .flatten()
            .map(OffloadFile::counters)
            .collect()
    }
}

/// The optimizer's moments by parameter name, without scalar states such as step counters.
fn moments_by_parameter(
    optimizer: &dyn trainyard_optim::Optimizer,
) -> HashMap<String, Vec<Tensor>> {
    let mut moments: HashMap<String, Vec<Tensor>> = HashMap::new();
    for (name, state) in optimizer.state() {
        if let Some((_, parameter)) = name.split_once('.')
            && state.dim() > 0
        {
            moments.entry(parameter.to_owned()).or_default().push(state);
        }
    }
    moments
}

/// The moments of a unit, parameter by parameter.
fn moments_of(members: &[Shard], known: &mut HashMap<String, Vec<Tensor>>) -> Vec<Tensor> {
    let of = |member: &Shard| known.remove(member.parameter.name());
    members.iter().filter_map(of).flatten().collect()
}

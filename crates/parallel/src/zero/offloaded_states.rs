//! Optimizer states of a sharded model that are offloaded to files, and staged unit by unit for the optimizer step.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Mutex;

use tch::Tensor;
use trainyard_nn::Parameter;
use trainyard_optim::Optimizer;
use trainyard_torch::meta;

use super::fsdp_state::{FsdpState, ShardInUse};
use super::fully_shard::{Shard, step_alone};
use super::offload_file::{Loaded, OffloadFile, OffloadOptions, OffloadStates, SwappedIn};
use crate::error::Result;
use crate::lock::lock;
use crate::offload::{Counters, Record};
use crate::strategy::{OptimizerStep, StateLoader, StateVisitor};

/// A sharded model's offloaded states.
pub(super) struct Offloaded(RefCell<OffloadedStates>);

impl Offloaded {
    pub(super) fn new(states: OffloadedStates) -> Offloaded {
        Offloaded(RefCell::new(states))
    }

    /// Which states are offloaded.
    pub(super) fn states(&self) -> OffloadStates {
        self.0.borrow().options.states
    }

    /// Steps the optimizer unit by unit. While one unit is updated, the next is read and the previous one written.
    pub(super) fn optimizer_step(
        &self,
        units: &[Vec<Shard>],
        state: &Mutex<FsdpState>,
        step: &mut OptimizerStep<'_>,
    ) -> Result<()> {
        let mut known = moments_by_parameter(step.optimizer);
        let is_first = !self.0.borrow().has_moments();
        for (index, members) in with_members(units) {
            if index + 1 < units.len() {
                self.0.borrow_mut().read_ahead(index + 1)?;
                lock(state).read_ahead(index + 1)?;
            }
            let moments = moments_of(members, &mut known);
            let shard = lock(state).take_shard(index)?;
            let staged = self.0.borrow_mut().take(index, members, &shard, &moments)?;
            step_alone(members, step)?;
            self.put_back(index, staged, shard, state)?;
            lock(state).unshard_updated(index)?;
            if is_first {
                self.offload_moments(index, units, step.optimizer)?;
            }
        }
        Ok(())
    }

    /// Writes a unit back after its master weights, or its parameters, have changed.
    fn put_back(
        &self,
        index: usize,
        staged: StagedUnit,
        shard: ShardInUse,
        state: &Mutex<FsdpState>,
    ) -> Result<()> {
        if let Some(master) = staged.masters() {
            tch::no_grad(|| shard.tensor().shallow_clone().f_copy_(master))?;
        }
        self.0.borrow_mut().put_back(staged)?;
        lock(state).put_shard(index, shard)
    }

    /// Offloads the moments that the optimizer has allocated for a unit.
    fn offload_moments(
        &self,
        index: usize,
        units: &[Vec<Shard>],
        optimizer: &dyn Optimizer,
    ) -> Result<()> {
        let moments = moments_of(&units[index], &mut moments_by_parameter(optimizer));
        let num_moments = |shard: &Shard| optimizer.num_moments(&shard.parameter) as usize;
        let mut states = self.0.borrow_mut();
        states.offload_moments(index, units, &moments, num_moments)
    }

    /// Visits the parameters of each unit while they are in memory, with their moments if an optimizer is given.
    pub(super) fn visit_states(
        &self,
        units: &[Vec<Shard>],
        state: &Mutex<FsdpState>,
        optimizer: Option<&dyn Optimizer>,
        visitor: &mut StateVisitor<'_>,
    ) -> Result<()> {
        let mut known = optimizer.map(moments_by_parameter).unwrap_or_default();
        for (index, members) in with_members(units) {
            let moments = moments_of(members, &mut known);
            let shard = lock(state).take_shard(index)?;
            let staged = self.0.borrow_mut().take(index, members, &shard, &moments)?;
            visitor(&parameters_of(members))?;
            drop(staged);
        }
        Ok(())
    }

    /// As [`Self::visit_states`], for a visitor that changes the parameters and gives them new moments. Communicates
    /// nothing, because the visitor may fail on one rank alone; the next forward pass gathers what has changed.
    pub(super) fn load_states(
        &self,
        units: &[Vec<Shard>],
        state: &Mutex<FsdpState>,
        optimizer: &mut dyn Optimizer,
        visitor: &mut StateLoader<'_>,
    ) -> Result<()> {
        self.0.borrow_mut().moments = None;
        for (index, members) in with_members(units) {
            let shard = lock(state).take_shard(index)?;
            let staged = self.0.borrow_mut().take(index, members, &shard, &[])?;
            visitor(&parameters_of(members), optimizer)?;
            self.put_back(index, staged, shard, state)?;
            self.offload_moments(index, units, optimizer)?;
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
    fn masters(&self) -> Option<&Tensor> {
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

    /// Whether the moments have a file.
    fn has_moments(&self) -> bool {
        self.moments.is_some()
    }

    /// Starts to read a unit's states.
    fn read_ahead(&mut self, unit: usize) -> Result<()> {
        for file in [&mut self.masters, &mut self.moments].into_iter().flatten() {
            file.read_ahead(unit)?;
        }
        Ok(())
    }

    /// Stages a unit's master weights, and its `moments` if any are given. `shard` is what its parameters are bound
    /// to if there are no separate master weights.
    fn take(
        &mut self,
        unit: usize,
        members: &[Shard],
        shard: &ShardInUse,
        moments: &[Tensor],
    ) -> Result<StagedUnit> {
        let masters = self.masters.as_mut().map(|s| s.take(unit)).transpose()?;
        let mut swapped_in = Vec::new();
        let data = match (&masters, shard) {
            (Some(staged), _) => Some(&staged[0]),
            (None, ShardInUse::Loaded(loaded)) => Some(&loaded[0]),
            (None, ShardInUse::Resident(_)) => None,
        };
        if let Some(data) = data {
            for member in members {
                let (start, length) = (member.in_chunk.start, member.in_chunk.len());
                let data = data.f_narrow(0, start as i64, length as i64)?;
                swapped_in.push(SwappedIn::new(member.parameter.tensor(), &data)?);
            }
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
    fn put_back(&mut self, unit: StagedUnit) -> Result<()> {
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

    /// Offloads a unit's moments, which the optimizer has allocated: `num_moments` of each parameter.
    fn offload_moments(
        &mut self,
        unit: usize,
        units: &[Vec<Shard>],
        moments: &[Tensor],
        num_moments: impl Fn(&Shard) -> usize,
    ) -> Result<()> {
        let Some(first) = moments.first() else {
            return Ok(());
        };
        if self.moments.is_none() {
            let lengths = |s: &Shard| std::iter::repeat_n(s.in_chunk.len(), num_moments(s));
            let record =
                |shards: &Vec<Shard>| Record::of(first.kind(), shards.iter().flat_map(lengths));
            let records = units.iter().map(record).collect();
            let is_meta = meta::is_meta(first);
            self.moments = Some(OffloadFile::new(
                &self.options,
                "moments",
                records,
                is_meta,
            )?);
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
            .filter_map(OffloadFile::counters)
            .collect()
    }
}

/// The optimizer's moments by parameter name, without scalar states such as step counters.
fn moments_by_parameter(optimizer: &dyn Optimizer) -> HashMap<String, Vec<Tensor>> {
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

/// The units that have parameters, with their indices.
fn with_members(units: &[Vec<Shard>]) -> impl Iterator<Item = (usize, &[Shard])> {
    let units = units.iter().map(Vec::as_slice).enumerate();
    units.filter(|(_, members)| !members.is_empty())
}

fn parameters_of(members: &[Shard]) -> Vec<Parameter> {
    let parameters = members.iter().map(|member| member.parameter.clone());
    parameters.collect()
}

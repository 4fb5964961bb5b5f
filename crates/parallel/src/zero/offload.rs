//! A sharded model whose states are on the shelf: taken off unit by unit, for as long as needed.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Mutex;

use tch::{Kind, Tensor};
use trainyard_nn::Parameter;

use super::fully_shard::{Shard, step_alone};
use super::lock;
use super::shards::Shards;
use super::shelf::{Borrowed, OffloadOptions, Shelf};
use crate::error::Result;
use crate::offload::{Counters, Record, Staged};
use crate::strategy::Update;

/// A sharded model's states, where they are not kept in memory.
pub(super) struct Offloaded(RefCell<States>);

impl Offloaded {
    pub(super) fn new(states: States) -> Offloaded {
        Offloaded(RefCell::new(states))
    }

    /// Steps unit by unit: while one is updated the next is read and the last is written.
    pub(super) fn update(
        &self,
        units: &[Vec<Shard>],
        shards: &Mutex<Shards>,
        update: &mut dyn Update,
    ) -> Result<()> {
        let mut known = by_parameter(update);
        let is_first = known.is_empty();
        for (index, members) in units.iter().enumerate() {
            if members.is_empty() {
                continue;
            }
            if index + 1 < units.len() {
                self.0.borrow_mut().read_ahead(index + 1)?;
                lock(shards).read_ahead(index + 1)?;
            }
            let moments = moments_of(members, &mut known);
            self.update_unit(index, members, &moments, shards, update)?;
            if is_first {
                let moments = moments_of(members, &mut by_parameter(update));
                self.0.borrow_mut().keep_moments(index, units, &moments)?;
            }
        }
        Ok(())
    }

    fn update_unit(
        &self,
        index: usize,
        members: &[Shard],
        moments: &[Tensor],
        shards: &Mutex<Shards>,
        update: &mut dyn Update,
    ) -> Result<()> {
        let travelling = lock(shards).take_shard(index)?;
        let mut states = self.0.borrow_mut();
        let at_hand = states.take(index, members, &travelling[0], moments)?;
        step_alone(members, update)?;
        if let Some(master) = at_hand.masters() {
            tch::no_grad(|| travelling[0].shallow_clone().f_copy_(master))?;
        }
        states.put_back(at_hand)?;
        lock(shards).put_shard(travelling)
    }

    /// Shows every parameter while it is off the shelf.
    pub(super) fn with_parameters(
        &self,
        units: &[Vec<Shard>],
        shards: &Mutex<Shards>,
        visitor: &mut dyn FnMut(&Parameter) -> Result<()>,
    ) -> Result<()> {
        for (index, members) in units.iter().enumerate() {
            if members.is_empty() {
                continue;
            }
            let travelling = lock(shards).take_shard(index)?;
            let mut states = self.0.borrow_mut();
            let at_hand = states.take(index, members, &travelling[0], &[])?;
            members.iter().try_for_each(|m| visitor(&m.parameter))?;
            drop(at_hand);
        }
        Ok(())
    }

    /// What was moved so far, file by file.
    pub(super) fn counters(&self, shards: &Mutex<Shards>) -> Vec<Counters> {
        let mut counters = self.0.borrow().counters();
        counters.extend(lock(shards).offload_counters());
        counters
    }
}

/// The optimiser's side of offload. Parameters as they travel are the shards' own affair.
pub(super) struct States {
    options: OffloadOptions,
    /// Master weights, where they are not the parameters that travel.
    masters: Option<Shelf>,
    /// Moments and the like: known once the optimiser has made them.
    moments: Option<Shelf>,
}

/// One unit's states off the shelf.
pub(super) struct AtHand {
    borrowed: Vec<Borrowed>,
    masters: Option<Staged>,
    moments: Option<Staged>,
}

impl AtHand {
    /// The unit's master weights, where they are not what travels.
    pub(super) fn masters(&self) -> Option<&Tensor> {
        self.masters.as_ref().map(|staged| &staged[0])
    }
}

impl States {
    /// Puts the master weights of all units away; `None` where a unit has none.
    pub(super) fn new(options: OffloadOptions, masters: &[Option<Tensor>]) -> Result<States> {
        let has_masters = masters.iter().any(Option::is_some);
        let keep = || Shelf::filled(&options, "masters", masters);
        Ok(States {
            masters: has_masters.then(keep).transpose()?,
            moments: None,
            options,
        })
    }

    /// Asks for what the unit will need.
    pub(super) fn read_ahead(&mut self, unit: usize) -> Result<()> {
        for shelf in [&mut self.masters, &mut self.moments].into_iter().flatten() {
            shelf.read_ahead(unit)?;
        }
        Ok(())
    }

    /// Takes a unit's states off the shelf, and those of its `moments` that are named. `travelling` is what its parameters stand on where they
    /// have no master weights of their own.
    pub(super) fn take(
        &mut self,
        unit: usize,
        members: &[Shard],
        travelling: &Tensor,
        moments: &[Tensor],
    ) -> Result<AtHand> {
        let masters = self.masters.as_mut().map(|s| s.take(unit)).transpose()?;
        let home = masters.as_ref().map_or(travelling, |staged| &staged[0]);
        let mut borrowed = Vec::new();
        for Shard {
            parameter, place, ..
        } in members
        {
            let data = home.f_narrow(0, place.start as i64, place.len() as i64)?;
            borrowed.push(Borrowed::new(parameter.tensor(), &data)?);
        }
        // Nobody who names no moments waits for them to be read.
        let wanted = self.moments.as_mut().filter(|_| !moments.is_empty());
        let staged = wanted.map(|shelf| shelf.take(unit)).transpose()?;
        for (state, part) in moments.iter().zip(staged.iter().flat_map(|s| s.iter())) {
            borrowed.push(Borrowed::new(state, part)?);
        }
        Ok(AtHand {
            borrowed,
            masters,
            moments: staged,
        })
    }

    /// Writes a unit's states behind.
    pub(super) fn put_back(&mut self, at_hand: AtHand) -> Result<()> {
        drop(at_hand.borrowed);
        let shelves = [
            (&mut self.masters, at_hand.masters),
            (&mut self.moments, at_hand.moments),
        ];
        for (shelf, staged) in shelves {
            if let (Some(shelf), Some(staged)) = (shelf, staged) {
                shelf.write_behind(staged)?;
            }
        }
        Ok(())
    }

    /// After a unit's first step: its moments, which the optimiser has just made, go on the shelf.
    pub(super) fn keep_moments(
        &mut self,
        unit: usize,
        units: &[Vec<Shard>],
        moments: &[Tensor],
    ) -> Result<()> {
        if self.moments.is_none() {
            let num_each = moments.len() / units[unit].len().max(1);
            let kind = moments.first().map_or(Kind::Float, Tensor::kind);
            let lengths = |shard: &Shard| std::iter::repeat_n(shard.place.len(), num_each);
            let record = |shards: &Vec<Shard>| Record::of(kind, shards.iter().flat_map(lengths));
            let records = units.iter().map(record).collect();
            self.moments = Some(Shelf::new(&self.options, "moments", records)?);
        }
        match &mut self.moments {
            Some(shelf) => shelf.put(unit, moments),
            None => Ok(()),
        }
    }

    /// What was moved so far.
    pub(super) fn counters(&self) -> Vec<Counters> {
        let shelves = [&self.masters, &self.moments];
        shelves.into_iter().flatten().map(Shelf::counters).collect()
    }
}

/// The optimiser's tensors by the parameter they belong to; not its counters, which are single
/// numbers.
fn by_parameter(update: &dyn Update) -> HashMap<String, Vec<Tensor>> {
    let mut moments: HashMap<String, Vec<Tensor>> = HashMap::new();
    for (name, state) in update.states() {
        if let Some((_, parameter)) = name.split_once('.')
            && state.dim() > 0
        {
            moments.entry(parameter.to_owned()).or_default().push(state);
        }
    }
    moments
}

/// Those of a unit, parameter by parameter.
fn moments_of(members: &[Shard], known: &mut HashMap<String, Vec<Tensor>>) -> Vec<Tensor> {
    let of = |member: &Shard| known.remove(member.parameter.name());
    members.iter().filter_map(of).flatten().collect()
}

//! A sharded model whose states are on the shelf: taken off unit by unit, for as long as needed.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Mutex;

use tch::{Kind, Tensor};
use trainyard_nn::Parameter;

use super::lock;
use super::shards::Shards;
use super::shelf::{Borrowed, OffloadOptions, Shelf};
use crate::error::Result;
use crate::offload::{Counters, Part, Record, Staged};
use crate::strategy::Update;

/// A shard, its gradient, and where it lies in this rank's chunk of its unit.
pub(super) struct Placed {
    pub parameter: Parameter,
    pub gradient: Tensor,
    pub place: Range<usize>,
}

/// All shards of a model, by unit, and where their states are.
pub(super) struct Offloaded {
    states: RefCell<States>,
    units: Vec<Vec<Placed>>,
}

impl Offloaded {
    pub(super) fn new(states: States, units: Vec<Vec<Placed>>) -> Offloaded {
        Offloaded {
            states: RefCell::new(states),
            units,
        }
    }

    /// Steps unit by unit: while one is updated the next is read and the last is written.
    pub(super) fn update(&self, shards: &Mutex<Shards>, update: &mut dyn Update) -> Result<()> {
        let all = self.units.iter().flatten();
        all.for_each(|member| member.parameter.set_gradient(None));
        let is_first = !update.states().iter().any(|(_, state)| state.dim() > 0);
        for (index, members) in self.units.iter().enumerate() {
            if members.is_empty() {
                continue;
            }
            if index + 1 < self.units.len() {
                self.states.borrow_mut().read_ahead(index + 1)?;
                lock(shards).read_ahead(index + 1)?;
            }
            self.update_unit(index, members, shards, update)?;
            if is_first {
                let mut states = self.states.borrow_mut();
                states.keep_moments(index, &self.units, update)?;
            }
        }
        Ok(())
    }

    fn update_unit(
        &self,
        index: usize,
        members: &[Placed],
        shards: &Mutex<Shards>,
        update: &mut dyn Update,
    ) -> Result<()> {
        let travelling = lock(shards).take_shard(index)?;
        let at_hand = self
            .states
            .borrow_mut()
            .take(index, members, &travelling[0], update)?;
        for member in members {
            let gradient = member.gradient.shallow_clone();
            member.parameter.set_gradient(Some(gradient));
        }
        let stepped = update.step();
        members.iter().for_each(|m| m.parameter.set_gradient(None));
        stepped?;
        if let Some(master) = at_hand.masters() {
            tch::no_grad(|| travelling[0].shallow_clone().f_copy_(master))?;
        }
        self.states.borrow_mut().put_back(at_hand)?;
        lock(shards).put_shard(travelling)
    }

    /// Shows every parameter while it is off the shelf.
    pub(super) fn with_parameters(
        &self,
        shards: &Mutex<Shards>,
        visitor: &mut dyn FnMut(&Parameter) -> Result<()>,
    ) -> Result<()> {
        for (index, members) in self.units.iter().enumerate() {
            if members.is_empty() {
                continue;
            }
            let travelling = lock(shards).take_shard(index)?;
            let mut states = self.states.borrow_mut();
            let at_hand = states.take(index, members, &travelling[0], &NoStates)?;
            members.iter().try_for_each(|m| visitor(&m.parameter))?;
            drop(at_hand);
        }
        Ok(())
    }

    /// What was moved so far, file by file.
    pub(super) fn counters(&self, shards: &Mutex<Shards>) -> Vec<Counters> {
        let mut counters = self.states.borrow().counters();
        counters.extend(lock(shards).offload_counters());
        counters
    }
}

/// Where parameters alone are of interest.
struct NoStates;

impl Update for NoStates {
    fn step(&mut self) -> Result<()> {
        Ok(())
    }

    fn states(&self) -> Vec<(String, Tensor)> {
        Vec::new()
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
    pub(super) fn new(options: OffloadOptions) -> States {
        States {
            options,
            masters: None,
            moments: None,
        }
    }

    /// Puts the master weights of all units away; `None` where a unit has none.
    pub(super) fn keep_masters(&mut self, masters: &[Option<Tensor>]) -> Result<()> {
        let record = |master: &Option<Tensor>| match master {
            Some(master) => Shelf::record(master.kind(), master.numel()),
            None => Record::default(),
        };
        let records = masters.iter().map(record).collect();
        let mut shelf = Shelf::new(&self.options, "masters", records)?;
        for (index, master) in masters.iter().enumerate() {
            if let Some(master) = master {
                shelf.put(index, std::slice::from_ref(master))?;
            }
        }
        self.masters = Some(shelf);
        Ok(())
    }

    /// Asks for what the unit will need.
    pub(super) fn read_ahead(&mut self, unit: usize) -> Result<()> {
        for shelf in [&mut self.masters, &mut self.moments].into_iter().flatten() {
            shelf.read_ahead(unit)?;
        }
        Ok(())
    }

    /// Takes a unit's states off the shelf. `travelling` is what its parameters stand on where they
    /// have no master weights of their own.
    pub(super) fn take(
        &mut self,
        unit: usize,
        parameters: &[Placed],
        travelling: &Tensor,
        update: &dyn Update,
    ) -> Result<AtHand> {
        let masters = self.masters.as_mut().map(|s| s.take(unit)).transpose()?;
        let home = masters.as_ref().map_or(travelling, |staged| &staged[0]);
        let mut borrowed = Vec::new();
        for Placed {
            parameter, place, ..
        } in parameters
        {
            let data = home.f_narrow(0, place.start as i64, place.len() as i64)?;
            borrowed.push(Borrowed::new(parameter.tensor(), &data)?);
        }
        let moments = self.moments.as_mut().map(|s| s.take(unit)).transpose()?;
        let states = states_of(parameters, update);
        if let Some(staged) = &moments {
            for (state, part) in states.iter().zip(staged.iter()) {
                borrowed.push(Borrowed::new(state, part)?);
            }
        }
        Ok(AtHand {
            borrowed,
            masters,
            moments,
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
        all: &[Vec<Placed>],
        update: &dyn Update,
    ) -> Result<()> {
        let states = states_of(&all[unit], update);
        if self.moments.is_none() {
            let num_each = states.len() / all[unit].len().max(1);
            let kind = states.first().map_or(Kind::Float, Tensor::kind);
            let parts = |member: &Placed| {
                let num_elements = member.place.len();
                std::iter::repeat_n(Part { kind, num_elements }, num_each)
            };
            let record = |members: &Vec<Placed>| Record {
                parts: members.iter().flat_map(parts).collect(),
            };
            let records = all.iter().map(record).collect();
            self.moments = Some(Shelf::new(&self.options, "moments", records)?);
        }
        match &mut self.moments {
            Some(shelf) => shelf.put(unit, &states),
            None => Ok(()),
        }
    }

    /// What was moved so far.
    pub(super) fn counters(&self) -> Vec<Counters> {
        let shelves = [&self.masters, &self.moments];
        shelves.into_iter().flatten().map(Shelf::counters).collect()
    }
}

/// The optimiser's tensors beside these parameters, parameter by parameter; not its counters, which
/// are single numbers.
fn states_of(parameters: &[Placed], update: &dyn Update) -> Vec<Tensor> {
    let mut by_parameter: HashMap<String, Vec<Tensor>> = HashMap::new();
    for (name, state) in update.states() {
        if let Some((_, parameter)) = name.split_once('.')
            && state.dim() > 0
        {
            by_parameter
                .entry(parameter.to_owned())
                .or_default()
                .push(state);
        }
    }
    let of = |member: &Placed| by_parameter.remove(member.parameter.name());
    parameters.iter().filter_map(of).flatten().collect()
}

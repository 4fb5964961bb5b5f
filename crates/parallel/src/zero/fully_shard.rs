//! The model as its user sees it: a strategy whose parameters are this rank's shards.

use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use trainyard_mesh::Axis;
use trainyard_nn::{Context, Intercept, Model, Module, Parameter, Run, Unit};
use trainyard_torch::autograd::HookHandle;
use trainyard_torch::{Group, World};

use super::at_units::{AtUnits, listen};
use super::blank::blank;
use super::offload::Offloaded;
use super::owned::{mark_lent, owned_parameters};
use super::schedule::Schedule;
use super::shards::{Shards, Wiring};
use super::unit::{Kinds, ShardedUnit};
use super::{ShardOptions, Stage, lock, shard_axes_of};
use crate::error::{ParallelError, Result};
use crate::offload::Counters;
use crate::precision::Precision;
use crate::strategy::{Passes, Strategy, Sync, Update};
use crate::terms::Terms;
use crate::volume::{ShardedModel, StateBytes, Volume, Widths};

/// A model whose states are spread over the ranks of `dp_shard` and `cp`, in as many copies as
/// `dp_replicate` has ranks; those of experts over the ranks of `efsdp`. Its parameters are this rank's
/// shards.
pub struct FullyShard<M> {
    model: M,
    families: Vec<Family>,
    interceptors: Vec<Rc<dyn Intercept>>,
    /// Where states are not kept in memory; then there is one family.
    offloaded: Option<Offloaded>,
    terms: Terms,
    _hooks: Vec<HookHandle>,
}

/// Parameters that are sharded over the same ranks. Each family is gathered, released and reduced by
/// itself, at the same units.
struct Family {
    /// This rank's shards, by unit.
    units: Vec<Vec<Shard>>,
    shards: Arc<Mutex<Shards>>,
    formulas: ShardedModel,
}

/// This rank's part of a parameter, where its gradient is, and where it lies in the unit's chunk.
pub(super) struct Shard {
    /// What layers compute with.
    whole: Parameter,
    /// What the optimiser trains.
    pub parameter: Parameter,
    gradient: Tensor,
    pub place: Range<usize>,
}

/// Steps with gradients for these shards alone; afterwards they have none.
pub(super) fn step_alone(shards: &[Shard], update: &mut dyn Update) -> Result<()> {
    for shard in shards {
        let gradient = shard.gradient.shallow_clone();
        shard.parameter.set_gradient(Some(gradient));
    }
    let stepped = update.step();
    clear(shards);
    stepped
}

fn clear<'a>(shards: impl IntoIterator<Item = &'a Shard>) {
    for shard in shards {
        shard.parameter.set_gradient(None);
    }
}

impl<M: Model> FullyShard<M> {
    /// Shards a model over the ranks of `world`. All ranks must give it the same weights.
    pub fn new(model: M, world: &World, options: ShardOptions) -> Result<FullyShard<M>> {
        let owned = owned_parameters(&model)?;
        let Some(first) = owned.iter().flatten().next() else {
            return Err(ParallelError::NothingToShard);
        };
        // Asked before anything is cut: from then on layers' own parameters have another type.
        let kinds = kinds_of(first, &options.precision);
        let mut families = Vec::new();
        for is_of_experts in [false, true] {
            let own: Vec<Vec<Parameter>> = owned
                .iter()
                .map(|members| members.iter().cloned())
                .map(|members| members.filter(|p| p.layout().is_of_experts() == is_of_experts))
                .map(Iterator::collect)
                .collect();
            if own.iter().any(|members| !members.is_empty()) {
                families.push(Family::new(&model, &own, world, &options, kinds)?);
            }
        }
        let offloaded = match (&options.offload, &families[..]) {
            (Some(_), _) if options.stage != Stage::Parameters => {
                return Err(ParallelError::OffloadNeedsStage3);
            }
            (Some(offload), [only]) => Some(Offloaded::new(lock(&only.shards).offload(offload)?)),
            (Some(_), _) => return Err(ParallelError::OffloadOfExperts),
            (None, _) => None,
        };
        let mut hooks = Vec::new();
        let mut interceptors: Vec<Rc<dyn Intercept>> = Vec::new();
        for family in &families {
            hooks.extend(listen(&family.shards)?);
            interceptors.push(Rc::new(AtUnits {
                shards: Arc::clone(&family.shards),
                output: options.precision.output,
            }));
        }
        interceptors.extend(options.inside);
        let all = families
            .iter()
            .flat_map(|family| family.units.iter().flatten());
        let all: Vec<Parameter> = all.map(|shard: &Shard| shard.parameter.clone()).collect();
        Ok(FullyShard {
            terms: Terms::of(&all),
            model,
            families,
            interceptors,
            offloaded,
            _hooks: hooks,
        })
    }

    /// The wrapped model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// What the formulas for bytes need to know of it: of experts, if there are any, after the rest.
    pub fn formulas(&self) -> impl Iterator<Item = &ShardedModel> {
        self.families.iter().map(|family| &family.formulas)
    }

    fn all_shards(&self) -> impl Iterator<Item = &Shard> {
        let units = self.families.iter().flat_map(|family| &family.units);
        units.flatten()
    }

    /// Whether there are gradients of all ranks to step with.
    fn has_gradients(&self) -> Result<bool> {
        let first = self.all_shards().next();
        let gradient = first.map(|shard| shard.parameter.gradient()).transpose()?;
        Ok(gradient.flatten().is_some())
    }

    /// The same for all families.
    fn for_each(&self, act: impl Fn(&mut Shards) -> trainyard_torch::Result<()>) -> Result<()> {
        for family in &self.families {
            act(&mut lock(&family.shards))?;
        }
        Ok(())
    }

    fn shard_of(&self, parameter: &Parameter) -> Option<&Shard> {
        self.all_shards().find(|shard| shard.whole.is(parameter))
    }
}

impl<M: Model> Strategy for FullyShard<M> {
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Run> {
        self.for_each(Shards::begin_forward)?;
        Ok(trainyard_nn::run(&self.model, x, cx, &self.interceptors)?)
    }

    fn start_backward(&self, run: Run, loss: &Tensor, sync: Sync) -> Result<()> {
        self.for_each(|shards| shards.begin_backward(sync))?;
        Ok(run.backward(loss)?)
    }

    fn expect_weights(&self) -> Result<()> {
        self.for_each(|shards| shards.begin_backward(Sync::Keep))
    }

    fn start_reduce(&self, sync: Sync) -> Result<()> {
        self.for_each(|shards| shards.start_reduce_all(sync))
    }

    fn finish_reduce(&self) -> Result<Vec<String>> {
        let (mut is_reduced, mut names) = (true, Vec::new());
        for family in &self.families {
            let (sync, missing) = lock(&family.shards).finish()?;
            is_reduced &= sync == Sync::Reduce;
            names.extend(missing);
        }
        if !names.is_empty() {
            return Err(ParallelError::UnusedParameters { names });
        }
        if is_reduced {
            for shard in self.all_shards() {
                let gradient = shard.gradient.shallow_clone();
                shard.parameter.set_gradient(Some(gradient));
            }
            self.terms.add_up()?;
        }
        Ok(Vec::new())
    }

    fn unshard(&self) -> Result<()> {
        self.for_each(Shards::unshard)
    }

    fn reshard(&self) -> Result<()> {
        self.for_each(Shards::reshard)
    }

    fn zero_grad(&self) -> Result<()> {
        clear(self.all_shards());
        self.for_each(Shards::clear_gradients)
    }

    fn update(&self, update: &mut dyn Update) -> Result<()> {
        if !self.updates_by_parts() {
            return update.step();
        }
        if !self.has_gradients()? {
            return Ok(());
        }
        // Each unit gets its own back when its turn comes.
        clear(self.all_shards());
        for family in &self.families {
            match &self.offloaded {
                Some(offloaded) => offloaded.update(&family.units, &family.shards, update)?,
                None => family.update_in_memory(update)?,
            }
        }
        Ok(())
    }

    fn updates_by_parts(&self) -> bool {
        let stage = self.families.first().map(|family| family.formulas.stage);
        self.offloaded.is_some() || stage != Some(Stage::Parameters)
    }

    fn settle(&self) -> Result<()> {
        self.for_each(Shards::settle)
    }

    fn with_parameters(&self, visitor: &mut dyn FnMut(&Parameter) -> Result<()>) -> Result<()> {
        match (&self.offloaded, self.families.first()) {
            (Some(offloaded), Some(family)) => {
                offloaded.with_parameters(&family.units, &family.shards, visitor)
            }
            _ => self.parameters().iter().try_for_each(visitor),
        }
    }

    fn offload_counters(&self) -> Vec<Counters> {
        match (&self.offloaded, self.families.first()) {
            (Some(offloaded), Some(family)) => offloaded.counters(&family.shards),
            _ => Vec::new(),
        }
    }

    fn volume(&self, passes: Passes, world_size: usize) -> Volume {
        let of_family = |Family { formulas, .. }: &Family| {
            let num_ranks = formulas.num_shards * formulas.num_replicas;
            formulas.volume(passes).times(world_size / num_ranks)
        };
        let volume: Volume = self.families.iter().map(of_family).sum();
        let terms = self.families.first().map(|Family { formulas, .. }| {
            let terms = self.terms.bytes(formulas.widths.reduce);
            (terms, formulas.num_replicas)
        });
        match terms {
            Some((terms, num_replicas)) => volume.with_terms(&terms, num_replicas),
            None => volume,
        }
    }

    fn states(&self, num_moments: u64) -> StateBytes {
        let families = self.families.iter();
        families
            .map(|family| family.formulas.states(num_moments))
            .sum()
    }
}

impl<M: Model> Module for FullyShard<M> {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        self.model
            .visit(&mut |parameter| match self.shard_of(parameter) {
                Some(shard) => visitor(&shard.parameter),
                None => visitor(parameter),
            });
    }
}

impl<M: Model> Model for FullyShard<M> {
    fn units(&self) -> Vec<&dyn Unit> {
        self.model.units()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> trainyard_nn::Result<Tensor> {
        self.model.loss(output, targets)
    }

    fn sent_by_layers(&self, num_tokens: u64) -> u64 {
        self.model.sent_by_layers(num_tokens)
    }
}

impl Family {
    /// Shards the parameters of every unit, which are all of experts or all not.
    fn new(
        model: &dyn Model,
        owned: &[Vec<Parameter>],
        world: &World,
        options: &ShardOptions,
        kinds: Kinds,
    ) -> Result<Family> {
        let Some(first) = owned.iter().flatten().next() else {
            return Err(ParallelError::NothingToShard);
        };
        let shard_group = world.group(shard_axes_of(&first.layout()))?;
        let (mut units, mut shards_of_units) = (Vec::new(), Vec::new());
        for members in owned {
            let (unit, shards) = cut(members, &shard_group, options.stage, kinds)?;
            units.push(unit);
            shards_of_units.push(shards);
        }
        mark_lent(model, owned, &mut units);
        let sample = |kind| blank(&first.tensor().detach(), 0, kind);
        let wiring = Wiring {
            stage: options.stage,
            schedule: Schedule {
                reshard: options.reshard_after_forward,
                prefetch: options.prefetch,
                overlap: options.overlap,
            },
            op: options.op,
            replicate_group: world.group(Axis::DpReplicate)?,
            shard_group,
        };
        let formulas = formulas(&wiring, &units, kinds);
        let shards = Shards::new(wiring, units, &sample(kinds.param)?, &sample(kinds.reduce)?);
        Ok(Family {
            units: shards_of_units,
            shards: Arc::new(Mutex::new(shards)),
            formulas,
        })
    }

    /// Steps unit by unit where every unit's new parameters can leave at once.
    fn update_in_memory(&self, update: &mut dyn Update) -> Result<()> {
        for (index, shards) in self.units.iter().enumerate() {
            if !shards.is_empty() {
                step_alone(shards, update)?;
            }
            lock(&self.shards).publish(index)?;
        }
        Ok(())
    }
}

/// A unit cut, and this rank's shards of it; neither where it has nothing to train.
fn cut(
    members: &[Parameter],
    group: &Group,
    stage: Stage,
    kinds: Kinds,
) -> Result<(Option<ShardedUnit>, Vec<Shard>)> {
    if members.is_empty() {
        return Ok((None, Vec::new()));
    }
    let (unit, parameters) = ShardedUnit::new(members, group, stage, kinds)?;
    let mut shards = Vec::with_capacity(members.len());
    for (index, (whole, parameter)) in members.iter().zip(parameters).enumerate() {
        shards.push(Shard {
            whole: whole.clone(),
            parameter,
            gradient: unit.gradient_of(index)?,
            place: unit.place_in_chunk(index),
        });
    }
    Ok((Some(unit), shards))
}

fn formulas(wiring: &Wiring, units: &[Option<ShardedUnit>], kinds: Kinds) -> ShardedModel {
    let width = |kind: Kind| kind.elt_size_in_bytes() as u64;
    ShardedModel {
        stage: wiring.stage,
        reshard: wiring.schedule.reshard,
        rows: units
            .iter()
            .map(|unit| unit.as_ref().map_or(0, |unit| unit.padded() as u64))
            .collect(),
        num_held: units.iter().flatten().map(ShardedUnit::num_held).sum(),
        lent: units
            .iter()
            .map(|unit| unit.as_ref().is_some_and(|unit| unit.is_lent))
            .collect(),
        num_shards: wiring.shard_group.size(),
        num_replicas: wiring.replicate_group.size(),
        widths: Widths {
            master: width(kinds.master),
            param: width(kinds.param),
            reduce: width(kinds.reduce),
        },
    }
}

fn kinds_of(parameter: &Parameter, precision: &Precision) -> Kinds {
    let master = parameter.kind();
    Kinds {
        master,
        param: precision.param.unwrap_or(parameter.compute_kind()),
        reduce: precision.reduce.unwrap_or(master),
    }
}

//! Sharded data parallelism: ZeRO's three stages and hybrid sharding, by one mechanism.
//!
//! The parameters of a unit lie in one row, of which every rank holds a chunk. Three things can be
//! done with a row: gather it, release it, and reduce its gradients to the chunks. The stages differ
//! only in when:
//!
//! | stage | gathered | released | gradients |
//! |---|---|---|---|
//! | [`Stage::OptimizerStates`] | once after each optimiser step | never | kept whole, reduced once a step |
//! | [`Stage::Gradients`] | once after each optimiser step | never | reduced as each unit ends backward |
//! | [`Stage::Parameters`] | before each unit's forward and backward | after each | the same |
//!
//! ```no_run
//! # use trainyard_parallel::{FullyShard, ShardOptions, Strategy, Sync};
//! # use trainyard_nn::{Context, Llama, Model};
//! # fn step(model: Llama, world: trainyard_torch::World, x: tch::Tensor, y: tch::Tensor) -> trainyard_parallel::Result<()> {
//! let model = FullyShard::new(model, &world, ShardOptions::default())?;
//! let run = model.forward(&x, &Context::training(0))?;
//! let loss = model.loss(run.output(), &y)? / y.numel() as f64;
//! model.backward(run, &loss, Sync::Reduce)?; // every rank now has its shard of the gradients
//! # Ok(())
//! # }
//! ```

mod blank;
mod offload;
mod pool;
mod row;
mod schedule;
mod shards;
mod shelf;
mod unit;
mod whole;

use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};

use tch::{Kind, Tensor};
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{Context, Intercept, Model, Module, Parameter, Run, Unit, UnitCall};
use trainyard_torch::autograd::{HookHandle, post_accumulate_hook};
use trainyard_torch::{ReduceOp, World};

use crate::error::{ParallelError, Result};
use crate::offload::Counters;
use crate::precision::Precision;
use crate::strategy::{Strategy, Sync, Update};
use crate::volume::{ShardedModel, StateBytes, Volume, Widths};
use offload::{Offloaded, Placed};
use schedule::Schedule;
use shards::{Shards, Wiring};
use unit::{Kinds, ShardedUnit};

pub use row::Row;
pub use schedule::Reshard;
pub use shelf::OffloadOptions;
pub use whole::whole;

/// What is sharded; each stage shards what those before it do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Stage 1: the optimiser's states, master weights among them.
    OptimizerStates,
    /// Stage 2: and gradients.
    Gradients,
    /// Stage 3: and parameters.
    #[default]
    Parameters,
}

/// How [`FullyShard`] works.
pub struct ShardOptions {
    /// What is sharded.
    pub stage: Stage,
    /// Number types.
    pub precision: Precision,
    /// `Mean` for losses that are means over a rank's own samples; `Sum` for losses that are already
    /// divided by the global count.
    pub op: ReduceOp,
    /// Whether parameters go after forward; stage 3 only.
    pub reshard_after_forward: Reshard,
    /// How many units are gathered ahead; stage 3 only.
    pub prefetch: usize,
    /// Whether communication runs beside computation. Results are the same to the bit.
    pub overlap: bool,
    /// Where parameters and the optimiser's states are kept while nobody computes with them; in
    /// memory if absent. Stage 3 only.
    pub offload: Option<OffloadOptions>,
    /// What else intercepts units, inside of gathering: recomputation, for one.
    pub inside: Vec<Rc<dyn Intercept>>,
}

impl Default for ShardOptions {
    fn default() -> Self {
        ShardOptions {
            stage: Stage::default(),
            precision: Precision::default(),
            op: ReduceOp::Mean,
            reshard_after_forward: Reshard::default(),
            prefetch: 1,
            overlap: true,
            offload: None,
            inside: Vec::new(),
        }
    }
}

/// The axes over which states are sharded: ranks along `cp` see other parts of the same sequences
/// but hold the same model, so they share its states too.
pub fn shard_axes() -> AxisSet {
    AxisSet::of([Axis::DpShard, Axis::Cp])
}

/// A model whose states are spread over the ranks of `dp_shard` and `cp`, in as many copies as
/// `dp_replicate` has ranks. Its parameters are this rank's shards.
pub struct FullyShard<M> {
    model: M,
    /// The model's own parameters and, for those that are trained, this rank's shard.
    parameters: Vec<(Parameter, Option<Shard>)>,
    /// How many of them each unit owns.
    num_members: Vec<usize>,
    shards: Arc<Mutex<Shards>>,
    interceptors: Vec<Rc<dyn Intercept>>,
    /// Where states are not kept in memory.
    offloaded: Option<Offloaded>,
    formulas: ShardedModel,
    _hooks: Vec<HookHandle>,
}

/// This rank's part of a parameter, and where its gradient is.
struct Shard {
    parameter: Parameter,
    gradient: Tensor,
}

impl<M: Model> FullyShard<M> {
    /// Shards a model over the ranks of `world`. All ranks must give it the same weights.
    pub fn new(model: M, world: &World, options: ShardOptions) -> Result<FullyShard<M>> {
        let shard_group = world.group(shard_axes())?;
        let owned = owned_parameters(&model)?;
        let Some(first) = owned.iter().flatten().next() else {
            return Err(ParallelError::NothingToShard);
        };
        // Asked before anything is cut: from then on layers' own parameters have another type.
        let kinds = kinds_of(first, &options.precision);
        let mut parameters: Vec<(Parameter, Option<Shard>)> = Vec::new();
        let mut units = Vec::with_capacity(owned.len());
        for members in &owned {
            if members.is_empty() {
                units.push(None);
                continue;
            }
            let (unit, shards) = ShardedUnit::new(members, &shard_group, options.stage, kinds)?;
            for (index, (parameter, shard)) in members.iter().zip(shards).enumerate() {
                let gradient = unit.gradient_of(index)?;
                let shard = Shard {
                    parameter: shard,
                    gradient,
                };
                parameters.push((parameter.clone(), Some(shard)));
            }
            units.push(Some(unit));
        }
        mark_lent(&model, &owned, &mut units);
        let sample = |kind| blank::blank(&first.tensor().detach(), 0, kind);
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
        let mut shards = Shards::new(wiring, units, &sample(kinds.param)?, &sample(kinds.reduce)?);
        let offloaded = match &options.offload {
            Some(_) if options.stage != Stage::Parameters => {
                return Err(ParallelError::OffloadNeedsStage3);
            }
            Some(offload) => {
                let states = shards.offload(offload)?;
                Some(Offloaded::new(states, placed(&owned, &parameters, &shards)))
            }
            None => None,
        };
        let shards = Arc::new(Mutex::new(shards));
        let hooks = listen(&shards)?;
        let mut interceptors: Vec<Rc<dyn Intercept>> = vec![Rc::new(AtUnits {
            shards: Arc::clone(&shards),
            output: options.precision.output,
        })];
        interceptors.extend(options.inside);
        Ok(FullyShard {
            model,
            parameters,
            num_members: owned.iter().map(Vec::len).collect(),
            shards,
            interceptors,
            offloaded,
            formulas,
            _hooks: hooks,
        })
    }

    /// The wrapped model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// What the formulas for bytes need to know of it.
    pub fn formulas(&self) -> &ShardedModel {
        &self.formulas
    }

    /// Steps unit by unit where every unit's new parameters can leave at once.
    fn update_in_memory(&self, update: &mut dyn Update) -> Result<()> {
        if self.formulas.stage == Stage::Parameters {
            return update.step();
        }
        let gradients: Vec<_> = self
            .parameters
            .iter()
            .filter_map(|(_, shard)| Some(shard.as_ref()?.parameter.clone()))
            .map(|parameter| Ok((parameter.gradient()?, parameter)))
            .collect::<Result<_>>()?;
        gradients.iter().for_each(|(_, p)| p.set_gradient(None));
        let mut rest = &gradients[..];
        for (index, &num_members) in self.num_members.iter().enumerate() {
            let (unit, others) = rest.split_at(num_members);
            rest = others;
            for (gradient, parameter) in unit {
                let gradient = gradient.as_ref().map(Tensor::shallow_clone);
                parameter.set_gradient(gradient);
            }
            if num_members > 0 {
                update.step()?;
            }
            unit.iter().for_each(|(_, p)| p.set_gradient(None));
            lock(&self.shards).publish(index)?;
        }
        Ok(())
    }

    fn shard_of(&self, parameter: &Parameter) -> Option<&Shard> {
        let mut known = self.parameters.iter();
        let (_, shard) = known.find(|(own, _)| own.is(parameter))?;
        shard.as_ref()
    }
}

impl<M: Model> Strategy for FullyShard<M> {
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Run> {
        lock(&self.shards).begin_forward()?;
        Ok(trainyard_nn::run(&self.model, x, cx, &self.interceptors)?)
    }

    fn backward(&self, run: Run, loss: &Tensor, sync: Sync) -> Result<Vec<String>> {
        lock(&self.shards).begin_backward(sync)?;
        run.backward(loss)?;
        let names = lock(&self.shards).end_backward()?;
        if !names.is_empty() {
            return Err(ParallelError::UnusedParameters { names });
        }
        if sync == Sync::Reduce {
            for shard in self
                .parameters
                .iter()
                .filter_map(|(_, shard)| shard.as_ref())
            {
                let gradient = shard.gradient.shallow_clone();
                shard.parameter.set_gradient(Some(gradient));
            }
        }
        Ok(Vec::new())
    }

    fn zero_grad(&self) -> Result<()> {
        for shard in self
            .parameters
            .iter()
            .filter_map(|(_, shard)| shard.as_ref())
        {
            shard.parameter.set_gradient(None);
        }
        Ok(lock(&self.shards).clear_gradients()?)
    }

    fn update(&self, update: &mut dyn Update) -> Result<()> {
        match &self.offloaded {
            Some(offloaded) => offloaded.update(&self.shards, update),
            None => self.update_in_memory(update),
        }
    }

    fn settle(&self) -> Result<()> {
        Ok(lock(&self.shards).settle()?)
    }

    fn with_parameters(&self, visitor: &mut dyn FnMut(&Parameter) -> Result<()>) -> Result<()> {
        match &self.offloaded {
            Some(offloaded) => offloaded.with_parameters(&self.shards, visitor),
            None => self.parameters().iter().try_for_each(visitor),
        }
    }

    fn offload_counters(&self) -> Vec<Counters> {
        match &self.offloaded {
            Some(offloaded) => offloaded.counters(&self.shards),
            None => Vec::new(),
        }
    }

    fn volume(&self, num_microbatches: usize) -> Volume {
        self.formulas.volume(num_microbatches)
    }

    fn states(&self, num_moments: u64) -> StateBytes {
        self.formulas.states(num_moments)
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
}

/// The shards of every unit, and where each lies in this rank's chunk.
fn placed(
    owned: &[Vec<Parameter>],
    parameters: &[(Parameter, Option<Shard>)],
    shards: &Shards,
) -> Vec<Vec<Placed>> {
    let mut units: Vec<Vec<Placed>> = owned.iter().map(|_| Vec::new()).collect();
    for (index, unit) in shards.units() {
        for (member, parameter) in owned[index].iter().enumerate() {
            let mut known = parameters.iter();
            if let Some((_, Some(shard))) = known.find(|(own, _)| own.is(parameter)) {
                units[index].push(Placed {
                    parameter: shard.parameter.clone(),
                    gradient: shard.gradient.shallow_clone(),
                    place: unit.place_in_chunk(member),
                });
            }
        }
    }
    units
}

/// Gathers, releases and reduces at the call site of units.
struct AtUnits {
    shards: Arc<Mutex<Shards>>,
    output: Option<Kind>,
}

impl Intercept for AtUnits {
    fn before_forward(&self, call: &UnitCall) -> trainyard_nn::Result<()> {
        Ok(lock(&self.shards).before_forward(call.index)?)
    }

    fn after_forward(&self, call: &UnitCall) -> trainyard_nn::Result<()> {
        Ok(lock(&self.shards).after_forward(call.index, call.context.training)?)
    }

    fn before_backward(&self, call: &UnitCall) -> trainyard_nn::Result<()> {
        Ok(lock(&self.shards).before_backward(call.index)?)
    }

    fn after_backward(&self, call: &UnitCall) -> trainyard_nn::Result<()> {
        Ok(lock(&self.shards).after_backward(call.index)?)
    }

    fn wrap(
        &self,
        call: &UnitCall,
        x: &Tensor,
        forward: &dyn Fn(&Tensor) -> trainyard_nn::Result<Tensor>,
    ) -> trainyard_nn::Result<Tensor> {
        let output = forward(x)?;
        match self.output {
            Some(kind) if call.is_last() => Ok(output.f_to_kind(kind)?),
            _ => Ok(output),
        }
    }
}

/// Tells the shards of every gradient that is complete.
fn listen(shards: &Arc<Mutex<Shards>>) -> Result<Vec<HookHandle>> {
    let leaves: Vec<(usize, usize, Tensor)> = lock(shards)
        .units()
        .flat_map(|(index, unit)| {
            let leaves = unit.leaves().enumerate();
            leaves.map(move |(member, leaf)| (index, member, leaf.shallow_clone()))
        })
        .collect();
    let hook = |(index, member, leaf): (usize, usize, Tensor)| {
        let shards = Arc::clone(shards);
        Ok(post_accumulate_hook(&leaf, move |_| {
            lock(&shards).gradient_ready(index, member)
        })?)
    };
    leaves.into_iter().map(hook).collect()
}

/// The trained parameters of every unit, each by the unit that owns it.
fn owned_parameters(model: &dyn Model) -> Result<Vec<Vec<Parameter>>> {
    let mut seen: Vec<Parameter> = Vec::new();
    let mut owned = Vec::new();
    for unit in model.units() {
        let mut members = Vec::new();
        unit.visit(&mut |parameter| {
            if parameter.is_trainable() && !seen.iter().any(|known| known.is(parameter)) {
                seen.push(parameter.clone());
                members.push(parameter.clone());
            }
        });
        owned.push(members);
    }
    let mut homeless = Vec::new();
    model.visit(&mut |parameter| {
        if parameter.is_trainable() && !seen.iter().any(|known| known.is(parameter)) {
            homeless.push(parameter.name().to_owned());
        }
    });
    match homeless.is_empty() {
        true => Ok(owned),
        false => Err(ParallelError::OutsideUnits { names: homeless }),
    }
}

fn mark_lent(model: &dyn Model, owned: &[Vec<Parameter>], units: &mut [Option<ShardedUnit>]) {
    for borrowed in model.units().iter().flat_map(|unit| unit.borrowed()) {
        let owner = owned
            .iter()
            .position(|members| members.iter().any(|p| p.is(&borrowed)));
        if let Some(unit) = owner.and_then(|owner| units[owner].as_mut()) {
            unit.is_lent = true;
        }
    }
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

/// A panic inside a hook was reported as that hook's error.
fn lock(shards: &Mutex<Shards>) -> MutexGuard<'_, Shards> {
    shards
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

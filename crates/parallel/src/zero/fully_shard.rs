//! FSDP/ZeRO as a strategy: a model whose parameters are this rank's shards.

use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use trainyard_cost::{
    CommCounts, CostModel, Encoding, ShardedModel, Stage, StateBytes, Volume, Widths,
};
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{Context, Model, Module, Parameter, Run, Unit, UnitHooks};
use trainyard_optim::Optimizer;
use trainyard_torch::autograd::HookHandle;
use trainyard_torch::{Group, ReduceOp, World};

use super::flat_param_handle::{FlatParamHandle, Kinds, ShardComm};
use super::fsdp_state::{CommConfig, FsdpState, UnitGroup};
use super::hooks::{FsdpHooks, register_grad_hooks};
use super::offload_file::OffloadStates;
use super::offloaded_states::Offloaded;
use super::prefetch::PrefetchPolicy;
use super::wrap_policy::{UnitSize, WrapPolicy};
use super::{GroupSharding, ShardOptions};
use crate::buffers::SharedBuffers;
use crate::compress::{Codec, PlainReduction, TwoHopReduction};
use crate::error::{ParallelError, Result};
use crate::flat::{params_of_units, zeros_flat};
use crate::lock::lock;
use crate::offload::Counters;
use crate::partial_grads::PartialGrads;
use crate::precision::Precision;
use crate::strategy::{
    DataParallelWrapper, GradSync, OptimizerStep, StateLoader, StateVisitor, StepInputs, Strategy,
    evaluate_microbatches, run_microbatches,
};

/// A model whose states are sharded over the ranks of `dp_shard` and `cp` and replicated over `dp_replicate`; the
/// states of experts are sharded over `efsdp`. Its parameters are this rank's shards.
pub struct FullyShard<M> {
    model: M,
    param_groups: Vec<ParamGroup>,
    unit_hooks: Vec<Rc<dyn UnitHooks>>,
    partial_grads: PartialGrads,
    buffers: SharedBuffers,
    precision: Precision,
    _hooks: Vec<HookHandle>,
}

/// Parameters that are sharded over the same ranks. Each group gathers, releases and reduces independently, at the
/// same units.
struct ParamGroup {
    /// This rank's shards, by group of units.
    shards: Vec<Vec<Shard>>,
    state: Arc<Mutex<FsdpState>>,
    formulas: ShardedModel,
    offloaded: Option<Offloaded>,
}

/// This rank's shard of a parameter.
pub(super) struct Shard {
    /// The full parameter, which layers compute with.
    full: Parameter,
    /// The shard, which the optimizer updates.
    pub parameter: Parameter,
    gradient: Tensor,
    /// The interval of the shard in the unit's chunk.
    pub in_chunk: Range<usize>,
}

/// Steps the optimizer with the gradients of these shards only, and clears them afterwards.
pub(super) fn step_alone(shards: &[Shard], step: &mut OptimizerStep<'_>) -> Result<()> {
    for shard in shards {
        let gradient = shard.gradient.shallow_clone();
        shard.parameter.set_gradient(Some(gradient));
    }
    let stepped = step.take();
    clear(shards);
    stepped
}

fn clear<'a>(shards: impl IntoIterator<Item = &'a Shard>) {
    for shard in shards {
        shard.parameter.set_gradient(None);
    }
}

/// Shards parameters, gradients and optimizer states of a model over the ranks of `world`, with the default options:
/// PyTorch's `fully_shard`.
pub fn fully_shard<M: Model>(model: M, world: &World, policy: WrapPolicy) -> Result<FullyShard<M>> {
    let options = ShardOptions {
        wrap_policy: policy,
        ..ShardOptions::default()
    };
    FullyShard::new(model, world, options)
}

impl<M: Model> FullyShard<M> {
    /// Shards a model over the ranks of `world`. All ranks must pass the same weights.
    pub fn new(model: M, world: &World, options: ShardOptions) -> Result<FullyShard<M>> {
        let assigned = params_of_units(&model)?;
        let Some(first) = assigned.iter().flatten().next() else {
            return Err(ParallelError::NothingToShard);
        };
        let offloads_all = options.offload.as_ref().map(|o| o.states) == Some(OffloadStates::All);
        if offloads_all && options.stage != Stage::Parameters {
            return Err(ParallelError::OffloadNeedsStage3);
        }
        let has_experts = assigned.iter().flatten().any(|p| p.layout().is_expert());
        if has_experts && options.op == ReduceOp::Mean && world.mesh().size(Axis::Ep) > 1 {
            return Err(ParallelError::MeanOfExperts);
        }
        // Determined before sharding, which changes the type of the layers' parameters.
        let kinds = kinds_of(first, &options.precision);
        let mut param_groups = Vec::new();
        for is_expert in [false, true] {
            let members_of_units: Vec<Vec<Parameter>> = assigned
                .iter()
                .map(|members| members.iter().cloned())
                .map(|members| members.filter(|p| p.layout().is_expert() == is_expert))
                .map(Iterator::collect)
                .collect();
            if members_of_units.iter().any(|members| !members.is_empty()) {
                param_groups.push(ParamGroup::new(
                    &model,
                    &members_of_units,
                    world,
                    &options,
                    kinds,
                )?);
            }
        }
        let is_whole = param_groups
            .iter()
            .all(|group| group.formulas.num_shards == 1);
        if is_whole && options.offload.is_none() && world.size() > 1 {
            return Err(ParallelError::ShardsNothing {
                mesh: world.mesh().to_string(),
            });
        }
        let mut hooks = Vec::new();
        let mut unit_hooks: Vec<Rc<dyn UnitHooks>> = Vec::new();
        for group in &param_groups {
            hooks.extend(register_grad_hooks(&group.state)?);
            unit_hooks.push(Rc::new(FsdpHooks {
                state: Arc::clone(&group.state),
                output: options.precision.output,
            }));
        }
        unit_hooks.extend(options.unit_hooks);
        let all = param_groups
            .iter()
            .flat_map(|group| group.shards.iter().flatten());
        let all: Vec<Parameter> = all.map(|shard: &Shard| shard.parameter.clone()).collect();
        let replicas = AxisSet::of([Axis::DpReplicate, Axis::DpShard, Axis::Cp]);
        let buffers =
            SharedBuffers::of(&model, &options.broadcast_buffers, || world.group(replicas))?;
        Ok(FullyShard {
            buffers,
            precision: options.precision,
            partial_grads: PartialGrads::of(&all),
            model,
            param_groups,
            unit_hooks,
            _hooks: hooks,
        })
    }

    /// The wrapped model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The inputs of the memory and communication formulas, per parameter group: dense parameters, then experts.
    pub fn formulas(&self) -> impl Iterator<Item = &ShardedModel> {
        self.param_groups.iter().map(|group| &group.formulas)
    }

    fn all_shards(&self) -> impl Iterator<Item = &Shard> {
        let groups = self.param_groups.iter();
        groups.flat_map(|group| group.shards.iter().flatten())
    }

    /// Whether there are reduced gradients to step with.
    fn has_gradients(&self) -> Result<bool> {
        let first = self.all_shards().next();
        let gradient = first.map(|shard| shard.parameter.gradient()).transpose()?;
        Ok(gradient.flatten().is_some())
    }

    /// Calls `act` for the state of every parameter group.
    fn for_each(&self, act: impl Fn(&mut FsdpState) -> trainyard_torch::Result<()>) -> Result<()> {
        for group in &self.param_groups {
            act(&mut lock(&group.state))?;
        }
        Ok(())
    }

    /// The parameter groups whose states are offloaded: all or none.
    fn offloaded_groups(&self) -> impl Iterator<Item = (&ParamGroup, &Offloaded)> {
        let groups = self.param_groups.iter();
        groups.filter_map(|group| Some((group, group.offloaded.as_ref()?)))
    }

    fn is_offloaded(&self) -> bool {
        self.offloaded_groups().next().is_some()
    }

    /// The parameters that are not sharded, such as buffers.
    fn unsharded(&self) -> Vec<Parameter> {
        let parameters = self.model.parameters().into_iter();
        parameters.filter(|p| self.shard_of(p).is_none()).collect()
    }

    fn shard_of(&self, parameter: &Parameter) -> Option<&Shard> {
        self.all_shards().find(|shard| shard.full.is(parameter))
    }
}

impl<M: Model> Strategy for FullyShard<M> {
    fn run_step(&self, step: &StepInputs<'_>) -> Result<Option<Tensor>> {
        run_microbatches(self, step)
    }

    fn evaluate(&self, step: &StepInputs<'_>) -> Result<Option<Tensor>> {
        evaluate_microbatches(self, step)
    }

    fn zero_grad(&self) -> Result<()> {
        clear(self.all_shards());
        self.for_each(FsdpState::clear_gradients)
    }

    fn optimizer_step(&self, step: &mut OptimizerStep<'_>) -> Result<()> {
        if !self.steps_per_unit() {
            return step.take();
        }
        if !self.has_gradients()? {
            return Ok(());
        }
        // Gradients are set again unit by unit.
        clear(self.all_shards());
        for group in &self.param_groups {
            match &group.offloaded {
                Some(offloaded) => offloaded.optimizer_step(&group.shards, &group.state, step)?,
                None => group.step_in_memory(step)?,
            }
        }
        Ok(())
    }

    fn wait_pending(&self) -> Result<()> {
        self.buffers.broadcast_if_stale()?;
        self.for_each(FsdpState::wait_pending)
    }

    fn visit_states(
        &self,
        optimizer: Option<&dyn Optimizer>,
        visitor: &mut StateVisitor<'_>,
    ) -> Result<()> {
        if !self.is_offloaded() {
            return visitor(&self.parameters());
        }
        for (group, offloaded) in self.offloaded_groups() {
            offloaded.visit_states(&group.shards, &group.state, optimizer, visitor)?;
        }
        visitor(&self.unsharded())
    }

    fn load_states(
        &self,
        optimizer: &mut dyn Optimizer,
        visitor: &mut StateLoader<'_>,
    ) -> Result<()> {
        if !self.is_offloaded() {
            return visitor(&self.parameters(), optimizer);
        }
        for (group, offloaded) in self.offloaded_groups() {
            offloaded.load_states(&group.shards, &group.state, optimizer, visitor)?;
        }
        visitor(&self.unsharded(), optimizer)
    }

    fn offload_counters(&self) -> Vec<Counters> {
        let groups = self.offloaded_groups();
        let counters = groups.map(|(group, offloaded)| offloaded.counters(&group.state));
        counters.flatten().collect()
    }
}

impl<M: Model> DataParallelWrapper for FullyShard<M> {
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Run> {
        self.buffers.broadcast_if_stale()?;
        self.for_each(FsdpState::begin_forward)?;
        let x = self.precision.cast_input(x)?;
        Ok(trainyard_nn::run(&self.model, &x, cx, &self.unit_hooks)?)
    }

    fn start_backward(&self, run: Run, loss: &Tensor, sync: GradSync) -> Result<()> {
        self.for_each(|state| state.begin_backward(sync))?;
        Ok(run.backward(loss)?)
    }

    fn begin_weight_grads(&self) -> Result<()> {
        self.for_each(|state| state.begin_backward(GradSync::None))
    }

    fn start_reduce(&self, sync: GradSync) -> Result<()> {
        self.for_each(|state| state.reduce_all_grads(sync))
    }

    fn finish_reduce(&self) -> Result<Vec<String>> {
        let (mut is_reduced, mut names) = (true, Vec::new());
        for group in &self.param_groups {
            let (sync, missing) = lock(&group.state).finish()?;
            is_reduced &= sync == GradSync::Full;
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
            self.partial_grads.all_reduce()?;
            self.buffers.end_step();
        }
        Ok(Vec::new())
    }

    fn unshard(&self) -> Result<()> {
        self.for_each(FsdpState::unshard_all)
    }

    fn reshard(&self) -> Result<()> {
        self.for_each(FsdpState::reshard_all)
    }

    fn steps_per_unit(&self) -> bool {
        let stage = self.param_groups.first().map(|group| group.formulas.stage);
        self.is_offloaded() || stage != Some(Stage::Parameters)
    }
}

impl<M: Model> CostModel for FullyShard<M> {
    fn volume(&self, counts: CommCounts, world_size: usize) -> Volume {
        let of_group = |ParamGroup { formulas, .. }: &ParamGroup| {
            let num_ranks = formulas.num_shards * formulas.num_replicas;
            formulas.volume(counts).times(world_size / num_ranks)
        };
        let volume: Volume = self.param_groups.iter().map(of_group).sum();
        let partial = self
            .param_groups
            .first()
            .map(|ParamGroup { formulas, .. }| {
                let partial = self.partial_grads.bytes(formulas.widths.reduce);
                (partial, formulas.num_replicas)
            });
        let volume = match partial {
            Some((partial, num_replicas)) => volume.with_partial_grads(&partial, num_replicas),
            None => volume,
        };
        [volume, self.buffers.volume(world_size)].into_iter().sum()
    }

    fn states(&self) -> StateBytes {
        let in_memory = |group: &ParamGroup| {
            let states = group.formulas.states();
            let offloaded = group.offloaded.as_ref().map(Offloaded::states);
            StateBytes {
                parameters: match offloaded {
                    Some(OffloadStates::All) => 0,
                    _ => states.parameters,
                },
                optimizer: if offloaded.is_some() {
                    0
                } else {
                    states.optimizer
                },
                ..states
            }
        };
        self.param_groups.iter().map(in_memory).sum()
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

    fn layer_comm_bytes(&self, num_tokens: u64) -> Option<u64> {
        self.model.layer_comm_bytes(num_tokens)
    }
}

impl ParamGroup {
    /// Shards the given parameters of every unit, which are either all of experts or all dense.
    fn new(
        model: &dyn Model,
        assigned: &[Vec<Parameter>],
        world: &World,
        options: &ShardOptions,
        kinds: Kinds,
    ) -> Result<ParamGroup> {
        let Some(first) = assigned.iter().flatten().next() else {
            return Err(ParallelError::NothingToShard);
        };
        let sharding = GroupSharding::of(&first.layout(), options);
        let secondary = sharding.secondary_axes.map(|axes| world.group(axes));
        let comm = ShardComm {
            group: world.group(sharding.axes)?,
            secondary_group: secondary.transpose()?,
            gradient_codec: options.gradient_codec.clone(),
            parameter_codec: options.parameter_codec.clone(),
        };
        let width = kinds.reduce.elt_size_in_bytes();
        let bytes_of = |members: &Vec<Parameter>| -> u64 {
            let elements: usize = members.iter().map(|p| p.tensor().numel()).sum();
            (elements * width) as u64
        };
        let units = model.units();
        let tied: Vec<Parameter> = units.iter().flat_map(|u| u.tied_parameters()).collect();
        let sizes = units.iter().zip(assigned);
        let sizes = sizes.map(|(unit, members)| UnitSize::of(*unit, bytes_of(members)));
        let sizes: Vec<UnitSize> = sizes.collect();
        let (mut groups, mut shards_of_groups) = (Vec::new(), Vec::new());
        for units in options.wrap_policy.groups(&sizes) {
            let members = assigned[units.clone()].concat();
            let (mut handle, shards) = shard_members(&members, &comm.group, &sharding, kinds)?;
            if let Some(handle) = &mut handle {
                if let Some(group) = &comm.secondary_group {
                    handle.keep_secondary(group)?;
                }
                handle.is_shared = members.iter().any(|p| tied.iter().any(|t| t.is(p)));
            }
            groups.push(UnitGroup { units, handle });
            shards_of_groups.push(shards);
        }
        let sample = |kind| zeros_flat(&first.tensor().detach(), 0, kind);
        let comm = CommConfig {
            stage: sharding.stage,
            prefetch: PrefetchPolicy {
                reshard: options.reshard_after_forward,
                num_units: options.prefetch,
                overlap: options.overlap,
            },
            op: options.op,
            replicate_group: world.group(sharding.replica_axes)?,
            keeps_buffers: !world.is_on_gpu(),
            replica_hook: match &options.gradient_codec {
                Some(codec) => Box::new(TwoHopReduction::new(Arc::clone(codec))),
                None => Box::new(PlainReduction),
            },
            shards: comm,
        };
        let formulas = formulas(&comm, &groups, kinds);
        let mut state = FsdpState::new(comm, groups, &sample(kinds.param)?, &sample(kinds.reduce)?);
        let offloaded = match &options.offload {
            Some(offload) => {
                let offload = offload.for_group(sharding.stage);
                Some(Offloaded::new(state.offload(&offload)?))
            }
            None => None,
        };
        Ok(ParamGroup {
            shards: shards_of_groups,
            state: Arc::new(Mutex::new(state)),
            formulas,
            offloaded,
        })
    }

    /// Steps group by group, so that the updated parameters of a group are gathered while the next is updated.
    fn step_in_memory(&self, step: &mut OptimizerStep<'_>) -> Result<()> {
        for (index, shards) in self.shards.iter().enumerate() {
            if !shards.is_empty() {
                step_alone(shards, step)?;
            }
            lock(&self.state).unshard_updated(index)?;
        }
        Ok(())
    }
}

/// Shards the parameters of a group of units, and returns this rank's shards; none if there is nothing to train.
fn shard_members(
    members: &[Parameter],
    group: &Group,
    sharding: &GroupSharding,
    kinds: Kinds,
) -> Result<(Option<FlatParamHandle>, Vec<Shard>)> {
    if members.is_empty() {
        return Ok((None, Vec::new()));
    }
    let (unit, parameters) = FlatParamHandle::new(members, group, sharding, kinds)?;
    let mut shards = Vec::with_capacity(members.len());
    for (index, (full, parameter)) in members.iter().zip(parameters).enumerate() {
        shards.push(Shard {
            full: full.clone(),
            gradient: unit.gradient_of(index)?.f_view_as(parameter.tensor())?,
            parameter,
            in_chunk: unit.interval_in_chunk(index),
        });
    }
    Ok((Some(unit), shards))
}

fn formulas(comm: &CommConfig, groups: &[UnitGroup], kinds: Kinds) -> ShardedModel {
    let width = |kind: Kind| kind.elt_size_in_bytes() as u64;
    let handles = || groups.iter().map(|group| group.handle.as_ref());
    ShardedModel {
        stage: comm.stage,
        reshard: comm.prefetch.reshard,
        flat_sizes: handles()
            .map(|handle| handle.map_or(0, |handle| handle.padded() as u64))
            .collect(),
        shared: handles()
            .map(|handle| handle.is_some_and(|handle| handle.is_shared))
            .collect(),
        num_shards: comm.shards.group.size(),
        num_replicas: comm.replicate_group.size(),
        gathered: encoding(comm.shards.parameter_codec.as_ref(), width(kinds.param)),
        reduced: encoding(comm.shards.gradient_codec.as_ref(), width(kinds.reduce)),
        num_secondary_shards: comm.shards.secondary_group.as_ref().map(Group::size),
        widths: Widths {
            master: width(kinds.master),
            param: width(kinds.param),
            reduce: width(kinds.reduce),
        },
    }
}

/// How numbers of this many bytes are sent.
fn encoding(codec: Option<&Arc<dyn Codec>>, width: u64) -> Encoding {
    codec.map_or(Encoding::Plain(width), |codec| codec.encoding())
}

fn kinds_of(parameter: &Parameter, precision: &Precision) -> Kinds {
    let master = parameter.kind();
    Kinds {
        master,
        param: precision.param.unwrap_or(parameter.compute_kind()),
        reduce: precision.reduce.unwrap_or(master),
    }
}

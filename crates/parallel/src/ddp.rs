//! Distributed data parallelism: a replica of the model per rank, with the batch split over ranks.
//!
//! ```no_run
//! # use trainyard_parallel::{DataParallelWrapper, Ddp, DdpOptions, GradSync};
//! # use trainyard_nn::{Context, Decoder, Model};
//! # fn step(model: Decoder, group: trainyard_torch::Group, x: tch::Tensor, y: tch::Tensor) -> trainyard_parallel::Result<()> {
//! let model = Ddp::new(model, &group, DdpOptions::default())?;
//! let run = model.forward(&x, &Context::training(0))?;
//! let loss = model.loss(run.output(), &y)? / y.numel() as f64;
//! model.backward(run, &loss, GradSync::Full)?; // gradients are now those of the global batch
//! # Ok(())
//! # }
//! ```

use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use tch::Tensor;
use trainyard_cost::{CommCounts, CostModel, StateBytes, Volume};
use trainyard_nn::{Context, Model, Module, Parameter, Run, Unit, UnitHooks};
use trainyard_torch::autograd::{HookHandle, post_accumulate_hook};
use trainyard_torch::{Group, ReduceOp, autograd};

use crate::buffers::{BroadcastBuffers, SharedBuffers};
use crate::compress::{GradientHook, PlainReduction};
use crate::error::{ParallelError, Result};
use crate::flat::{BucketLimits, in_order_of_use};
use crate::lock::lock;
use crate::param_state::ParamState;
use crate::partial_grads::PartialGrads;
use crate::reducer::{Reducer, ReducerConfig, Slot};
use crate::strategy::{
    DataParallelWrapper, GradSync, StepInputs, Strategy, evaluate_microbatches, run_microbatches,
};

/// Options of [`Ddp`].
pub struct DdpOptions {
    /// `Mean` if the loss is a mean over the rank's own samples, `Sum` if it is already divided by the global
    /// count.
    pub op: ReduceOp,
    /// Bucket sizes.
    pub buckets: BucketLimits,
    /// Which buffers are broadcast before a forward pass.
    pub broadcast_buffers: BroadcastBuffers,
    /// Whether reductions overlap backward. Results are bitwise the same.
    pub overlap: bool,
    /// Whether parameters may be unused in a step. Costs one small all-reduce per step.
    pub find_unused_parameters: bool,
    /// The communication hook that reduces buckets.
    pub hook: Box<dyn GradientHook>,
    /// Hooks around each unit, such as activation checkpointing.
    pub unit_hooks: Vec<Rc<dyn UnitHooks>>,
}

impl Default for DdpOptions {
    fn default() -> Self {
        DdpOptions {
            op: ReduceOp::Mean,
            buckets: BucketLimits::default(),
            broadcast_buffers: BroadcastBuffers::default(),
            overlap: true,
            find_unused_parameters: false,
            hook: Box::new(PlainReduction),
            unit_hooks: Vec::new(),
        }
    }
}

/// A replicated model whose gradients are all-reduced over ranks.
pub struct Ddp<M> {
    model: M,
    parameters: Vec<Parameter>,
    /// Parameters by the group that reduces their gradients.
    param_groups: Vec<ParamGroup>,
    find_unused: bool,
    partial_grads: PartialGrads,
    buffers: SharedBuffers,
    /// Whether a reduction is in flight.
    is_reducing: Cell<bool>,
    unit_hooks: Vec<Rc<dyn UnitHooks>>,
    _hooks: Vec<HookHandle>,
}

/// Parameters whose gradients are reduced over the same ranks.
struct ParamGroup {
    /// None if the group has a single rank, which needs no reduction.
    reducer: Option<Arc<Mutex<Reducer>>>,
    num_ranks: usize,
    /// The communication of all gradients in a step.
    volume: Volume,
    /// Bytes of all parameters.
    bytes: u64,
    /// Bytes of the errors that the hook keeps.
    error_bytes: u64,
}

impl ParamGroup {
    fn new(parameters: &[Parameter], group: &Group, config: ReducerConfig) -> Result<ParamGroup> {
        let bytes = |p: &Parameter| (p.kind().elt_size_in_bytes() * p.tensor().numel()) as u64;
        let is_reduced = group.size() > 1 && !parameters.is_empty();
        let reducer = if is_reduced {
            let reducer = Reducer::new(parameters, group, config)?;
            reducer.broadcast_parameters()?;
            Some(reducer)
        } else {
            None
        };
        Ok(ParamGroup {
            num_ranks: group.size(),
            volume: reducer
                .as_ref()
                .map_or_else(Volume::default, Reducer::volume),
            bytes: parameters.iter().map(bytes).sum(),
            error_bytes: reducer.as_ref().map_or(0, Reducer::error_bytes),
            reducer: reducer.map(|reducer| Arc::new(Mutex::new(reducer))),
        })
    }

    /// Registers a hook on every leaf that reports its accumulated gradient to the reducer.
    fn register_grad_hooks(&self) -> Result<Vec<HookHandle>> {
        let Some(reducer) = &self.reducer else {
            return Ok(Vec::new());
        };
        let leaves: Vec<(Slot, Tensor)> = {
            let reducer = lock(reducer);
            let leaves = reducer.leaves();
            leaves
                .map(|(slot, leaf)| (slot, leaf.shallow_clone()))
                .collect()
        };
        let mut hooks = Vec::with_capacity(leaves.len());
        for (slot, leaf) in &leaves {
            let (reducer, slot) = (Arc::clone(reducer), *slot);
            hooks.push(post_accumulate_hook(leaf, move |_| {
                lock(&reducer).set_ready(slot)
            })?);
        }
        Ok(hooks)
    }
}

impl<M: Model> Ddp<M> {
    /// Wraps a model and broadcasts the parameters of rank 0 of the group.
    pub fn new(model: M, group: &Group, options: DdpOptions) -> Result<Ddp<M>> {
        Ddp::with_experts(model, group, group, options)
    }

    /// As [`Ddp::new`], for a model with experts: `expert_group` are the ranks that hold the same experts and
    /// reduce their gradients.
    pub fn with_experts(
        model: M,
        group: &Group,
        expert_group: &Group,
        options: DdpOptions,
    ) -> Result<Ddp<M>> {
        let parameters = in_order_of_use(&model);
        parameters.iter().try_for_each(Parameter::materialize)?;
        let find_unused = options.find_unused_parameters;
        let partial_grads = PartialGrads::of(&parameters);
        let config = ReducerConfig {
            op: options.op,
            hook: options.hook.into(),
            overlap: options.overlap,
            limits: options.buckets,
        };
        let is_same = group.name() == expert_group.name();
        let of_experts = |p: &Parameter| !is_same && p.layout().is_expert();
        let (experts, rest): (Vec<_>, Vec<_>) = parameters.iter().cloned().partition(of_experts);
        let mut param_groups = vec![ParamGroup::new(&rest, group, config.clone())?];
        if !experts.is_empty() {
            param_groups.push(ParamGroup::new(&experts, expert_group, config)?);
        }
        if group.size() > 1 {
            broadcast_buffers(&model, group)?;
        }
        let mut hooks = Vec::new();
        for group in &param_groups {
            hooks.extend(group.register_grad_hooks()?);
        }
        Ok(Ddp {
            buffers: SharedBuffers::of(&model, &options.broadcast_buffers, || Ok(group.clone()))?,
            model,
            parameters,
            param_groups,
            find_unused,
            partial_grads,
            is_reducing: Cell::new(false),
            unit_hooks: options.unit_hooks,
            _hooks: hooks,
        })
    }

    /// The wrapped model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Runs a backward pass, with the reduction of the gradients that it completes.
    fn run_backward(&self, sync: GradSync, backward: impl FnOnce() -> Result<()>) -> Result<()> {
        let is_last = sync == GradSync::Full;
        for reducer in self.reducers() {
            lock(reducer).begin(is_last)?;
        }
        backward()?;
        if is_last {
            self.flush_buckets()
        } else {
            Ok(())
        }
    }

    /// Starts the reduction of the buckets that backward has not started.
    fn flush_buckets(&self) -> Result<()> {
        self.is_reducing.set(true);
        for reducer in self.reducers() {
            let mut reducer = lock(reducer);
            let unused = reducer.unused();
            if !unused.is_empty() && !self.find_unused {
                return Err(ParallelError::UnusedParameters { names: unused });
            }
            reducer.flush_buckets(unused)?;
        }
        Ok(())
    }

    fn reducers(&self) -> impl Iterator<Item = &Arc<Mutex<Reducer>>> {
        self.param_groups
            .iter()
            .filter_map(|group| group.reducer.as_ref())
    }
}

impl<M: Model> Strategy for Ddp<M> {
    fn run_step(&self, step: &StepInputs<'_>) -> Result<Option<Tensor>> {
        run_microbatches(self, step)
    }

    fn evaluate(&self, step: &StepInputs<'_>) -> Result<Option<Tensor>> {
        evaluate_microbatches(self, step)
    }

    fn zero_grad(&self) -> Result<()> {
        for parameter in &self.parameters {
            autograd::clear_grad(parameter.tensor())?;
        }
        Ok(())
    }

    fn wait_pending(&self) -> Result<()> {
        self.buffers.broadcast_if_stale()
    }

    fn param_states(&self) -> Result<Vec<ParamState>> {
        let mut states = Vec::new();
        for reducer in self.reducers() {
            let reducer = lock(reducer);
            let group = reducer.group();
            let of_parameter = |(parameter, tensor)| ParamState {
                kind: "gradient_error",
                parameter,
                tensor,
                summed_over: Some(group.clone()),
            };
            states.extend(reducer.errors()?.into_iter().map(of_parameter));
        }
        Ok(states)
    }
}

impl<M: Model> DataParallelWrapper for Ddp<M> {
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Run> {
        self.buffers.broadcast_if_stale()?;
        for reducer in self.reducers().filter(|_| cx.training) {
            lock(reducer).set_step(cx.step);
        }
        Ok(trainyard_nn::run(&self.model, x, cx, &self.unit_hooks)?)
    }

    fn start_backward(&self, run: Run, loss: &Tensor, sync: GradSync) -> Result<()> {
        self.run_backward(sync, || Ok(run.backward(loss)?))
    }

    fn start_backward_interleaved(
        &self,
        run: Run,
        loss: &Tensor,
        sync: GradSync,
        other: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        self.run_backward(sync, || run.backward_interleaved(loss, other)?)
    }

    fn needs_grad_hooks(&self) -> bool {
        self.reducers().next().is_some()
    }

    fn start_reduce(&self, sync: GradSync) -> Result<()> {
        self.run_backward(sync, || Ok(()))
    }

    fn finish_reduce(&self) -> Result<Vec<String>> {
        if !self.is_reducing.replace(false) {
            return Ok(Vec::new());
        }
        let mut unused = Vec::new();
        for reducer in self.reducers() {
            let mut reducer = lock(reducer);
            let unused_here = reducer.finish()?;
            if self.find_unused {
                unused.extend(reducer.clear_globally_unused(&unused_here)?);
            }
        }
        self.partial_grads.all_reduce()?;
        self.buffers.end_step();
        Ok(unused)
    }
}

impl<M: Model> CostModel for Ddp<M> {
    fn volume(&self, _: CommCounts, world_size: usize) -> Volume {
        // Every rank holds a replica, so partial gradients are reduced once in each of the groups that share them.
        let width = |p: &Parameter| p.kind().elt_size_in_bytes() as u64;
        let partial = self
            .partial_grads
            .bytes(self.parameters.first().map_or(0, width));
        let num_ranks = partial.first().map_or(1, |bytes| bytes.num_ranks as usize);
        let of_group = |group: &ParamGroup| group.volume.times(world_size / group.num_ranks);
        let volume: Volume = self.param_groups.iter().map(of_group).sum();
        let volume = volume.with_partial_grads(&partial, world_size / num_ranks);
        [volume, self.buffers.volume(world_size)].into_iter().sum()
    }

    fn states(&self) -> StateBytes {
        let of_group = |group: &ParamGroup| StateBytes {
            parameters: group.bytes,
            // On one rank there are no buckets: autograd's gradients are released after every step.
            gradients: match group.num_ranks {
                1 => 0,
                _ => group.bytes + group.error_bytes,
            },
            optimizer: 0,
        };
        self.param_groups.iter().map(of_group).sum()
    }
}

impl<M: Model> Module for Ddp<M> {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        self.model.visit(visitor);
    }
}

impl<M: Model> Model for Ddp<M> {
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

fn broadcast_buffers(model: &dyn Model, group: &Group) -> Result<()> {
    for buffer in model.parameters().iter().filter(|p| !p.is_trainable()) {
        group
            .broadcast(buffer.tensor(), 0, trainyard_trace::Purpose::State)?
            .wait()?;
    }
    Ok(())
}

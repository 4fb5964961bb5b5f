//! Distributed data parallelism: one model per rank, one batch over all.
//!
//! ```no_run
//! # use trainyard_parallel::{Ddp, DdpOptions, Strategy, Sync};
//! # use trainyard_nn::{Context, Llama, Model};
//! # fn step(model: Llama, group: trainyard_torch::Group, x: tch::Tensor, y: tch::Tensor) -> trainyard_parallel::Result<()> {
//! let model = Ddp::new(model, &group, DdpOptions::default())?;
//! let run = model.forward(&x, &Context::training(0))?;
//! let loss = model.loss(run.output(), &y)? / y.numel() as f64;
//! model.backward(run, &loss, Sync::Reduce)?; // gradients are now those of the whole batch
//! # Ok(())
//! # }
//! ```

use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};

use tch::Tensor;
use trainyard_nn::{Context, Intercept, Model, Module, Parameter, Run, Unit};
use trainyard_torch::autograd::{HookHandle, post_accumulate_hook};
use trainyard_torch::{Group, ReduceOp, autograd};

use crate::bucket::BucketLimits;
use crate::compress::{GradientHook, PlainReduction};
use crate::error::{ParallelError, Result};
use crate::reducer::{Plan, Reducer};
use crate::strategy::{Passes, Strategy, Sync};
use crate::terms::Terms;
use crate::volume::{StateBytes, Volume, replicated_volume};

/// How [`Ddp`] reduces.
pub struct DdpOptions {
    /// `Mean` for losses that are means over a rank's own samples; `Sum` for losses that are already
    /// divided by the global count.
    pub op: ReduceOp,
    /// Sizes of buckets.
    pub buckets: BucketLimits,
    /// Whether reductions run while backward goes on. Results are the same to the bit.
    pub overlap: bool,
    /// Whether parameters may take no part in the loss. Costs one small reduction per step.
    pub find_unused_parameters: bool,
    /// What travels.
    pub hook: Box<dyn GradientHook>,
    /// What intercepts units: recomputation, for one.
    pub inside: Vec<Rc<dyn Intercept>>,
}

impl Default for DdpOptions {
    fn default() -> Self {
        DdpOptions {
            op: ReduceOp::Mean,
            buckets: BucketLimits::default(),
            overlap: true,
            find_unused_parameters: false,
            hook: Box::new(PlainReduction),
            inside: Vec::new(),
        }
    }
}

/// A model whose gradients are those of all ranks' batches.
pub struct Ddp<M> {
    model: M,
    parameters: Vec<Parameter>,
    /// Parameters by the ranks over which their gradients are reduced.
    families: Vec<Family>,
    find_unused: bool,
    terms: Terms,
    /// Whether a reduction is under way.
    is_reducing: Cell<bool>,
    interceptors: Vec<Rc<dyn Intercept>>,
    _hooks: Vec<HookHandle>,
}

/// Parameters whose gradients are reduced over the same ranks.
struct Family {
    /// None on a single rank, where there is nothing to reduce.
    reducer: Option<Arc<Mutex<Reducer>>>,
    num_ranks: usize,
    /// Of all gradients, as they travel.
    gradient_bytes: u64,
    /// Of all parameters.
    bytes: u64,
}

impl Family {
    fn new(parameters: &[Parameter], group: &Group, plan: Plan) -> Result<Family> {
        let width = |p: &Parameter| plan.hook.width(p.kind()) * p.tensor().numel() as u64;
        let bytes = |p: &Parameter| (p.kind().elt_size_in_bytes() * p.tensor().numel()) as u64;
        let is_reduced = group.size() > 1 && !parameters.is_empty();
        Ok(Family {
            num_ranks: group.size(),
            gradient_bytes: match is_reduced {
                true => parameters.iter().map(width).sum(),
                false => 0,
            },
            bytes: parameters.iter().map(bytes).sum(),
            reducer: match is_reduced {
                true => {
                    let reducer = Reducer::new(parameters, group, plan)?;
                    reducer.broadcast_parameters()?;
                    Some(Arc::new(Mutex::new(reducer)))
                }
                false => None,
            },
        })
    }

    /// Tells the reducer of every gradient that is complete.
    fn listen(&self) -> Result<Vec<HookHandle>> {
        let Some(reducer) = &self.reducer else {
            return Ok(Vec::new());
        };
        let leaves: Vec<Tensor> = {
            let reducer = lock(reducer);
            reducer
                .leaves()
                .map(|(_, leaf)| leaf.shallow_clone())
                .collect()
        };
        let mut hooks = Vec::with_capacity(leaves.len());
        for (number, leaf) in leaves.iter().enumerate() {
            let reducer = Arc::clone(reducer);
            hooks.push(post_accumulate_hook(leaf, move |_| {
                lock(&reducer).ready(number)
            })?);
        }
        Ok(hooks)
    }
}

impl<M: Model> Ddp<M> {
    /// Wraps a model; every rank's parameters become those of the group's first rank.
    pub fn new(model: M, group: &Group, options: DdpOptions) -> Result<Ddp<M>> {
        Ddp::with_experts(model, group, group, options)
    }

    /// The same for a model with experts, whose gradients are reduced over the ranks of `expert_group`:
    /// those that have the same experts.
    pub fn with_experts(
        model: M,
        group: &Group,
        expert_group: &Group,
        options: DdpOptions,
    ) -> Result<Ddp<M>> {
        let parameters = in_order_of_use(&model);
        let find_unused = options.find_unused_parameters;
        let terms = Terms::of(&parameters);
        let plan = Plan {
            op: options.op,
            hook: options.hook.into(),
            overlap: options.overlap,
            limits: options.buckets,
        };
        let is_same = group.name() == expert_group.name();
        let of_experts = |p: &Parameter| !is_same && p.layout().is_of_experts();
        let (experts, rest): (Vec<_>, Vec<_>) = parameters.iter().cloned().partition(of_experts);
        let mut families = vec![Family::new(&rest, group, plan.clone())?];
        if !experts.is_empty() {
            families.push(Family::new(&experts, expert_group, plan)?);
        }
        if group.size() > 1 {
            broadcast_buffers(&model, group)?;
        }
        let mut hooks = Vec::new();
        for family in &families {
            hooks.extend(family.listen()?);
        }
        Ok(Ddp {
            model,
            parameters,
            families,
            find_unused,
            terms,
            is_reducing: Cell::new(false),
            interceptors: options.inside,
            _hooks: hooks,
        })
    }

    /// The wrapped model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// A backward pass, with the reduction of what becomes complete in it.
    fn passing(&self, sync: Sync, pass: impl FnOnce() -> Result<()>) -> Result<()> {
        let is_last = sync == Sync::Reduce;
        for reducer in self.reducers() {
            lock(reducer).begin(is_last)?;
        }
        pass()?;
        match is_last {
            true => self.start_rest(),
            false => Ok(()),
        }
    }

    /// Starts what backward has not.
    fn start_rest(&self) -> Result<()> {
        self.is_reducing.set(true);
        for reducer in self.reducers() {
            let mut reducer = lock(reducer);
            let unused = reducer.unused();
            if !unused.is_empty() && !self.find_unused {
                return Err(ParallelError::UnusedParameters { names: unused });
            }
            reducer.start_rest(unused)?;
        }
        Ok(())
    }

    fn reducers(&self) -> impl Iterator<Item = &Arc<Mutex<Reducer>>> {
        self.families
            .iter()
            .filter_map(|family| family.reducer.as_ref())
    }
}

impl<M: Model> Strategy for Ddp<M> {
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Run> {
        Ok(trainyard_nn::run(&self.model, x, cx, &self.interceptors)?)
    }

    fn start_backward(&self, run: Run, loss: &Tensor, sync: Sync) -> Result<()> {
        self.passing(sync, || Ok(run.backward(loss)?))
    }

    fn start_backward_beside(
        &self,
        run: Run,
        loss: &Tensor,
        sync: Sync,
        other: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        self.passing(sync, || run.backward_beside(loss, other)?)
    }

    fn watches_gradients(&self) -> bool {
        self.reducers().next().is_some()
    }

    fn start_reduce(&self, sync: Sync) -> Result<()> {
        self.passing(sync, || Ok(()))
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
        self.terms.add_up()?;
        Ok(unused)
    }

    fn zero_grad(&self) -> Result<()> {
        for parameter in &self.parameters {
            autograd::clear_grad(parameter.tensor())?;
        }
        Ok(())
    }

    fn volume(&self, _: Passes, world_size: usize) -> Volume {
        // Every rank holds a copy of what it shares, so as many copies are added up as there are
        // sets of ranks that add up.
        let width = |p: &Parameter| p.kind().elt_size_in_bytes() as u64;
        let terms = self.terms.bytes(self.parameters.first().map_or(0, width));
        let num_ranks = terms.first().map_or(1, |term| term.num_ranks as usize);
        let of_family = |family: &Family| {
            replicated_volume(family.gradient_bytes, family.num_ranks)
                .times(world_size / family.num_ranks)
        };
        let volume: Volume = self.families.iter().map(of_family).sum();
        volume.with_terms(&terms, world_size / num_ranks)
    }

    fn states(&self, num_moments: u64) -> StateBytes {
        let of_family = |family: &Family| StateBytes {
            parameters: family.bytes,
            // On one rank autograd's own gradients are given back after every step.
            gradients: match family.num_ranks {
                1 => 0,
                _ => family.bytes,
            },
            optimizer: num_moments * family.bytes,
        };
        self.families.iter().map(of_family).sum()
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

    fn sent_by_layers(&self, num_tokens: u64) -> u64 {
        self.model.sent_by_layers(num_tokens)
    }
}

/// Trainable parameters in the order in which forward first uses them.
fn in_order_of_use(model: &dyn Model) -> Vec<Parameter> {
    let mut ordered: Vec<Parameter> = Vec::new();
    let mut add = |parameter: &Parameter| {
        if parameter.is_trainable() && !ordered.iter().any(|known| known.is(parameter)) {
            ordered.push(parameter.clone());
        }
    };
    for unit in model.units() {
        unit.visit(&mut add);
    }
    model.visit(&mut add);
    ordered
}

fn broadcast_buffers(model: &dyn Model, group: &Group) -> Result<()> {
    for buffer in model.parameters().iter().filter(|p| !p.is_trainable()) {
        group
            .broadcast(buffer.tensor(), 0, trainyard_trace::Purpose::State)?
            .wait()?;
    }
    Ok(())
}

/// A panic inside a hook was reported as that hook's error; the reducer is rebuilt by `begin`.
fn lock(reducer: &Mutex<Reducer>) -> MutexGuard<'_, Reducer> {
    reducer
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

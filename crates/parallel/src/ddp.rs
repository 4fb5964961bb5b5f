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
    /// None on a single rank, where there is nothing to reduce.
    reducer: Option<Arc<Mutex<Reducer>>>,
    find_unused: bool,
    num_ranks: usize,
    /// Of all gradients, as they travel.
    gradient_bytes: u64,
    terms: Terms,
    /// Whether a reduction is under way.
    is_reducing: Cell<bool>,
    interceptors: Vec<Rc<dyn Intercept>>,
    _hooks: Vec<HookHandle>,
}

impl<M: Model> Ddp<M> {
    /// Wraps a model; every rank's parameters become those of the group's first rank.
    pub fn new(model: M, group: &Group, options: DdpOptions) -> Result<Ddp<M>> {
        let parameters = in_order_of_use(&model);
        let find_unused = options.find_unused_parameters;
        let terms = Terms::of(&parameters);
        if group.size() == 1 {
            return Ok(Ddp {
                model,
                parameters,
                reducer: None,
                find_unused,
                num_ranks: 1,
                gradient_bytes: 0,
                terms,
                is_reducing: Cell::new(false),
                interceptors: options.inside,
                _hooks: Vec::new(),
            });
        }
        let width = |p: &Parameter| options.hook.width(p.kind()) * p.tensor().numel() as u64;
        let gradient_bytes = parameters.iter().map(width).sum();
        let plan = Plan {
            op: options.op,
            hook: options.hook,
            overlap: options.overlap,
            limits: options.buckets,
        };
        let reducer = Reducer::new(&parameters, group, plan)?;
        reducer.broadcast_parameters()?;
        broadcast_buffers(&model, group)?;
        let leaves: Vec<Tensor> = reducer
            .leaves()
            .map(|(_, leaf)| leaf.shallow_clone())
            .collect();
        let reducer = Arc::new(Mutex::new(reducer));
        let mut hooks = Vec::with_capacity(leaves.len());
        for (number, leaf) in leaves.iter().enumerate() {
            let reducer = Arc::clone(&reducer);
            hooks.push(post_accumulate_hook(leaf, move |_| {
                lock(&reducer).ready(number)
            })?);
        }
        Ok(Ddp {
            model,
            parameters,
            reducer: Some(reducer),
            find_unused,
            num_ranks: group.size(),
            gradient_bytes,
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
        if let Some(reducer) = &self.reducer {
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
        let Some(reducer) = &self.reducer else {
            return Ok(());
        };
        let mut reducer = lock(reducer);
        let unused = reducer.unused();
        if !unused.is_empty() && !self.find_unused {
            return Err(ParallelError::UnusedParameters { names: unused });
        }
        Ok(reducer.start_rest(unused)?)
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
        self.reducer.is_some()
    }

    fn start_reduce(&self, sync: Sync) -> Result<()> {
        self.passing(sync, || Ok(()))
    }

    fn finish_reduce(&self) -> Result<Vec<String>> {
        if !self.is_reducing.replace(false) {
            return Ok(Vec::new());
        }
        let mut unused = Vec::new();
        if let Some(reducer) = &self.reducer {
            let mut reducer = lock(reducer);
            let unused_here = reducer.finish()?;
            if self.find_unused {
                unused = reducer.clear_globally_unused(&unused_here)?;
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
        replicated_volume(self.gradient_bytes, self.num_ranks)
            .times(world_size / self.num_ranks)
            .with_terms(&terms, world_size / num_ranks)
    }

    fn states(&self, num_moments: u64) -> StateBytes {
        let width = |p: &Parameter| (p.kind().elt_size_in_bytes() * p.tensor().numel()) as u64;
        let bytes = self.parameters.iter().map(width).sum();
        StateBytes {
            parameters: bytes,
            // On one rank autograd's own gradients are given back after every step.
            gradients: if self.num_ranks > 1 { bytes } else { 0 },
            optimizer: num_moments * bytes,
        }
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

//! Calls the backward hooks of a run.
//!
//! Each unit gets a tensor hook on its output, which fires when the gradient of the output is known, and an identity
//! function on its input. The identity's backward runs after everything within the unit: of all ready nodes, the
//! autograd engine runs the one created last, and the identity is older than the unit's nodes. A unit whose input
//! requires no gradient (the first one) cannot have the identity; its `after_backward` runs when the whole backward
//! has ended.
//!
//! An error of a hook crosses libtorch as text. [`BackwardHooks`] stores the error itself, and
//! [`BackwardHooks::backward`] returns it.

use std::{
    cell::{Cell, RefCell},
    rc::{Rc, Weak},
};

use tch::Tensor;
use trainyard_torch::{
    TorchError,
    autograd::{self, HookHandle},
};

use crate::{
    NnError, Result, UnitCall, UnitHooks,
    thread_bound::ThreadBound,
    unit_hooks::{Event, notify},
};

/// The state of the backward hooks of one run.
pub(crate) struct BackwardHooks {
    hooks: Vec<Rc<dyn UnitHooks>>,
    open: RefCell<Vec<UnitCall>>,
    handles: RefCell<Vec<HookHandle>>,
    running: Cell<bool>,
    failure: RefCell<Option<NnError>>,
}

impl BackwardHooks {
    /// The backward hooks of a run, if any of `hooks` needs backward events.
    pub fn begin(hooks: &[Rc<dyn UnitHooks>], num_units: usize) -> Option<Rc<BackwardHooks>> {
        let backward_hooks: Vec<_> = hooks
            .iter()
            .filter(|hook| hook.needs_backward())
            .cloned()
            .collect();
        (!backward_hooks.is_empty()).then(|| {
            Rc::new(BackwardHooks {
                hooks: backward_hooks,
                open: RefCell::default(),
                handles: RefCell::new(Vec::with_capacity(num_units)),
                running: Cell::new(false),
                failure: RefCell::default(),
            })
        })
    }

    /// The input to pass to the unit instead of `x`: the same tensor behind an identity whose backward fires
    /// `after_backward`.
    pub fn wrap_input(self: &Rc<BackwardHooks>, call: &UnitCall, x: &Tensor) -> Result<Tensor> {
        if !x.requires_grad() {
            return Ok(x.shallow_clone());
        }
        let context = HookContext::new(self, call);
        Ok(autograd::apply(
            &[x],
            |_, inputs| Ok(inputs[0].f_detach()?),
            move |_, gradients| {
                context.fire(Event::AfterBackward)?;
                Ok(vec![gradients[0].as_ref().map(Tensor::shallow_clone)])
            },
        )?)
    }

    /// Registers the hook on the unit's output that fires `before_backward`.
    pub fn hook_output(self: &Rc<BackwardHooks>, call: &UnitCall, output: &Tensor) -> Result<()> {
        if output.requires_grad() {
            let context = HookContext::new(self, call);
            let handle = autograd::tensor_hook(output, move |_| {
                context.fire(Event::BeforeBackward)?;
                Ok(None)
            })?;
            self.handles.borrow_mut().push(handle);
        }
        Ok(())
    }

    /// Runs backward from `loss`, then fires `after_backward` for the units without the identity function.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        self.running.set(true);
        let result = loss.f_backward();
        self.running.set(false);
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        result?;
        while let Some(call) = self.last_open() {
            self.fire(Event::AfterBackward, &call)?;
        }
        Ok(())
    }

    fn last_open(&self) -> Option<UnitCall> {
        self.open.borrow().last().cloned()
    }

    /// Calls the hooks for a backward event. No `RefCell` is borrowed while they run.
    fn fire(&self, event: Event, call: &UnitCall) -> Result<()> {
        match event {
            Event::BeforeBackward => self.open.borrow_mut().push(call.clone()),
            _ => self
                .open
                .borrow_mut()
                .retain(|open| open.index != call.index),
        }
        notify(&self.hooks, event, call)
    }
}

/// The state that a libtorch hook captures: its [`BackwardHooks`] and its unit call.
struct HookContext(ThreadBound<(Weak<BackwardHooks>, UnitCall)>);

impl HookContext {
    fn new(backward_hooks: &Rc<BackwardHooks>, call: &UnitCall) -> HookContext {
        HookContext(ThreadBound::new((
            Rc::downgrade(backward_hooks),
            call.clone(),
        )))
    }

    fn fire(&self, event: Event) -> trainyard_torch::Result<()> {
        let bound = self.0.get().map_err(to_torch_error)?;
        let (backward_hooks, call) = &*bound;
        let without_run = || NnError::BackwardWithoutRun {
            unit: call.name.to_string(),
        };
        let backward_hooks = backward_hooks
            .upgrade()
            .ok_or_else(|| to_torch_error(without_run()))?;
        if !backward_hooks.running.get() {
            return Err(to_torch_error(without_run()));
        }
        backward_hooks.fire(event, call).map_err(|error| {
            let text = to_torch_error(&error);
            backward_hooks.failure.borrow_mut().get_or_insert(error);
            text
        })
    }
}

/// Converts an error to one that can cross libtorch, which keeps only its text.
fn to_torch_error(error: impl ToString) -> TorchError {
    TorchError::Other(error.to_string())
}

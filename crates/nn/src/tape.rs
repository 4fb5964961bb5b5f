//! How a run's interceptors hear of its backward pass.
//!
//! Two things are put around every unit: a hook on its output, which fires when the gradient of the
//! output is known, and an identity on its input, whose backward runs after everything within the
//! unit, because the engine takes of all ready nodes the one created last, and the identity is
//! older than the unit's own nodes. A unit whose input needs no gradient (the first one) cannot
//! have the identity; it is closed when the pass has ended.
//!
//! An error raised in a hook crosses libtorch as text. The tape keeps the error itself, and
//! [`Tape::backward`] returns that one.

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
    Intercept, NnError, Result, UnitCall,
    intercept::{Event, tell},
    thread_bound::ThreadBound,
};

/// The backward side of one run.
pub(crate) struct Tape {
    interceptors: Vec<Rc<dyn Intercept>>,
    open: RefCell<Vec<UnitCall>>,
    hooks: RefCell<Vec<HookHandle>>,
    running: Cell<bool>,
    failure: RefCell<Option<NnError>>,
}

impl Tape {
    /// A tape, if any interceptor watches backward.
    pub fn begin(interceptors: &[Rc<dyn Intercept>], num_units: usize) -> Option<Rc<Tape>> {
        let watching: Vec<_> = interceptors
            .iter()
            .filter(|interceptor| interceptor.watches_backward())
            .cloned()
            .collect();
        (!watching.is_empty()).then(|| {
            Rc::new(Tape {
                interceptors: watching,
                open: RefCell::default(),
                hooks: RefCell::new(Vec::with_capacity(num_units)),
                running: Cell::new(false),
                failure: RefCell::default(),
            })
        })
    }

    /// What the unit is given instead of `x`: the same tensor, behind an identity that closes the
    /// unit in backward.
    pub fn enter(self: &Rc<Tape>, call: &UnitCall, x: &Tensor) -> Result<Tensor> {
        if !x.requires_grad() {
            return Ok(x.shallow_clone());
        }
        let listener = Listener::new(self, call);
        Ok(autograd::single(
            &[x],
            |_, inputs| Ok(inputs[0].f_detach()?),
            move |_, gradients| {
                listener.hear(Event::AfterBackward)?;
                Ok(vec![gradients[0].as_ref().map(Tensor::shallow_clone)])
            },
        )?)
    }

    /// Opens the unit in backward when the gradient of its output is known.
    pub fn leave(self: &Rc<Tape>, call: &UnitCall, output: &Tensor) -> Result<()> {
        if output.requires_grad() {
            let listener = Listener::new(self, call);
            let hook = autograd::tensor_hook(output, move |_| {
                listener.hear(Event::BeforeBackward)?;
                Ok(None)
            })?;
            self.hooks.borrow_mut().push(hook);
        }
        Ok(())
    }

    /// Runs backward from `loss`, then closes the units that could not close themselves.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        self.running.set(true);
        let passed = loss.f_backward();
        self.running.set(false);
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        passed?;
        while let Some(call) = self.last_open() {
            self.happen(Event::AfterBackward, &call)?;
        }
        Ok(())
    }

    fn last_open(&self) -> Option<UnitCall> {
        self.open.borrow().last().cloned()
    }

    /// Tells the interceptors of an event in backward. Nothing is borrowed while they work.
    fn happen(&self, event: Event, call: &UnitCall) -> Result<()> {
        match event {
            Event::BeforeBackward => self.open.borrow_mut().push(call.clone()),
            _ => self
                .open
                .borrow_mut()
                .retain(|open| open.index != call.index),
        }
        tell(&self.interceptors, event, call)
    }
}

/// What a hook holds: the way back to its tape and the passage it belongs to.
struct Listener(ThreadBound<(Weak<Tape>, UnitCall)>);

impl Listener {
    fn new(tape: &Rc<Tape>, call: &UnitCall) -> Listener {
        Listener(ThreadBound::new((Rc::downgrade(tape), call.clone())))
    }

    fn hear(&self, event: Event) -> trainyard_torch::Result<()> {
        let bound = self.0.get().map_err(carried)?;
        let (tape, call) = &*bound;
        let without_run = || NnError::BackwardWithoutRun {
            unit: call.name.to_string(),
        };
        let tape = tape.upgrade().ok_or_else(|| carried(without_run()))?;
        if !tape.running.get() {
            return Err(carried(without_run()));
        }
        tape.happen(event, call).map_err(|error| {
            let text = carried(&error);
            tape.failure.borrow_mut().get_or_insert(error);
            text
        })
    }
}

/// The text of an error, as libtorch can carry it.
fn carried(error: impl ToString) -> TorchError {
    TorchError::Other(error.to_string())
}

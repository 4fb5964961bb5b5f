//! Hooks that strategies register around the forward and backward of each unit.
//!
//! Hooks nest in the given order: the first is outermost. It runs first before something begins and last after it
//! ended.

use std::{fmt, rc::Rc};

use tch::Tensor;

use crate::{NnError, Result, UnitCall};

/// Hooks around the units of a model. Every method has a default that does nothing.
///
/// In each run, each unit calls `before_forward`, `wrap` around the forward pass, and `after_forward`. Then, from the
/// last unit to the first, it calls `before_backward` when the gradient of the unit's output is known, and
/// `after_backward` when all gradients of the unit are. A unit whose output requires no gradient has no backward
/// calls.
pub trait UnitHooks {
    /// Changes the arguments of the call; runs before all other hooks.
    fn configure(&self, _call: &mut UnitCall) {}

    /// Runs before the unit's forward.
    fn before_forward(&self, _call: &UnitCall) -> Result<()> {
        Ok(())
    }

    /// Runs after the unit's forward.
    fn after_forward(&self, _call: &UnitCall) -> Result<()> {
        Ok(())
    }

    /// Runs when the gradient of the unit's output is known, before the unit's backward.
    fn before_backward(&self, _call: &UnitCall) -> Result<()> {
        Ok(())
    }

    /// Runs when every parameter of the unit has its gradient of this run.
    fn after_backward(&self, _call: &UnitCall) -> Result<()> {
        Ok(())
    }

    /// Runs the unit by calling `forward`, possibly without autograd or more than once.
    fn wrap(
        &self,
        _call: &UnitCall,
        x: &Tensor,
        forward: &dyn Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        forward(x)
    }

    /// Whether these hooks need the backward events. If no hooks do, `run` adds nothing to the autograd graph.
    fn needs_backward(&self) -> bool {
        true
    }
}

/// The points at which hooks are called.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub enum Event {
    /// [`UnitHooks::before_forward`].
    BeforeForward,
    /// [`UnitHooks::wrap`].
    Forward,
    /// [`UnitHooks::after_forward`].
    AfterForward,
    /// [`UnitHooks::before_backward`].
    BeforeBackward,
    /// [`UnitHooks::after_backward`].
    AfterBackward,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Event::BeforeForward => "before_forward",
            Event::Forward => "forward",
            Event::AfterForward => "after_forward",
            Event::BeforeBackward => "before_backward",
            Event::AfterBackward => "after_backward",
        })
    }
}

/// A list of hooks, outermost first.
pub(crate) type HookList = [Rc<dyn UnitHooks>];

/// Calls all hooks for one event: outermost first before something begins, innermost first after it ended.
pub(crate) fn notify(hooks: &HookList, event: Event, call: &UnitCall) -> Result<()> {
    let result = match event {
        Event::BeforeForward => outside_in(hooks, |i| i.before_forward(call)),
        Event::AfterForward => inside_out(hooks, |i| i.after_forward(call)),
        Event::BeforeBackward => outside_in(hooks, |i| i.before_backward(call)),
        Event::AfterBackward => inside_out(hooks, |i| i.after_backward(call)),
        Event::Forward => Ok(()),
    };
    result.map_err(|source| in_unit(event, call, source))
}

/// Runs `forward` inside [`UnitHooks::wrap`] of all hooks.
pub(crate) fn wrapped(
    hooks: &HookList,
    call: &UnitCall,
    x: &Tensor,
    forward: &dyn Fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    match hooks.split_first() {
        None => forward(x),
        Some((outer, inner)) => outer.wrap(call, x, &|x| wrapped(inner, call, x, forward)),
    }
}

/// Adds the unit and the event to an error.
pub(crate) fn in_unit(event: Event, call: &UnitCall, source: NnError) -> NnError {
    NnError::Hook {
        event,
        unit: call.name.to_string(),
        source: Box::new(source),
    }
}

fn outside_in(hooks: &HookList, call: impl FnMut(&Rc<dyn UnitHooks>) -> Result<()>) -> Result<()> {
    hooks.iter().try_for_each(call)
}

fn inside_out(hooks: &HookList, call: impl FnMut(&Rc<dyn UnitHooks>) -> Result<()>) -> Result<()> {
    hooks.iter().rev().try_for_each(call)
}

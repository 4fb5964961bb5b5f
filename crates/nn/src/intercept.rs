//! What strategies do at the call site of a unit.
//!
//! Interceptors are nested in the order given: the first is outermost, so it is told first before
//! something begins and last after it ended. Gathering parameters outside of a trace span, or
//! inside of it, is thus a matter of order alone.

use std::{fmt, rc::Rc};

use tch::Tensor;

use crate::{NnError, Result, UnitCall};

/// A strategy at the call site. Every method has a default that does nothing.
///
/// In each run, for each unit: `before_forward`, `wrap` around the forward pass, `after_forward`;
/// then, from the last unit to the first, `before_backward` when the gradient of the unit's output
/// is there, and `after_backward` when all gradients of the unit are. A unit whose output needs no
/// gradient has no backward.
pub trait Intercept {
    /// May change what the unit is told; comes before everything else.
    fn adjust(&self, _call: &mut UnitCall) {}

    /// The unit is about to run.
    fn before_forward(&self, _call: &UnitCall) -> Result<()> {
        Ok(())
    }

    /// The unit has run.
    fn after_forward(&self, _call: &UnitCall) -> Result<()> {
        Ok(())
    }

    /// The gradient of the unit's output is known; nothing of the unit's backward has run.
    fn before_backward(&self, _call: &UnitCall) -> Result<()> {
        Ok(())
    }

    /// Every parameter of the unit has its gradient of this run.
    fn after_backward(&self, _call: &UnitCall) -> Result<()> {
        Ok(())
    }

    /// Runs the unit by calling `forward`, or in its own way: without autograd, or more than once.
    fn wrap(
        &self,
        _call: &UnitCall,
        x: &Tensor,
        forward: &dyn Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        forward(x)
    }

    /// Whether the backward events are of interest. If no interceptor wants them, nothing is added
    /// to the autograd graph.
    fn watches_backward(&self) -> bool {
        true
    }
}

/// The moments at which interceptors are called.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub enum Event {
    /// [`Intercept::before_forward`].
    BeforeForward,
    /// [`Intercept::wrap`].
    Forward,
    /// [`Intercept::after_forward`].
    AfterForward,
    /// [`Intercept::before_backward`].
    BeforeBackward,
    /// [`Intercept::after_backward`].
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

/// Interceptors, outermost first.
pub(crate) type Interceptors = [Rc<dyn Intercept>];

/// Tells every interceptor of one event, those that begin from the outside in, those that end from
/// the inside out.
pub(crate) fn tell(interceptors: &Interceptors, event: Event, call: &UnitCall) -> Result<()> {
    let told = match event {
        Event::BeforeForward => outside_in(interceptors, |i| i.before_forward(call)),
        Event::AfterForward => inside_out(interceptors, |i| i.after_forward(call)),
        Event::BeforeBackward => outside_in(interceptors, |i| i.before_backward(call)),
        Event::AfterBackward => inside_out(interceptors, |i| i.after_backward(call)),
        Event::Forward => Ok(()),
    };
    told.map_err(|source| at(event, call, source))
}

/// Runs `forward` inside the wraps of all interceptors.
pub(crate) fn wrapped(
    interceptors: &Interceptors,
    call: &UnitCall,
    x: &Tensor,
    forward: &dyn Fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    match interceptors.split_first() {
        None => forward(x),
        Some((outer, inner)) => outer.wrap(call, x, &|x| wrapped(inner, call, x, forward)),
    }
}

/// The same error, told with the unit and the moment.
pub(crate) fn at(event: Event, call: &UnitCall, source: NnError) -> NnError {
    NnError::Intercept {
        event,
        unit: call.name.to_string(),
        source: Box::new(source),
    }
}

fn outside_in(
    interceptors: &Interceptors,
    tell: impl FnMut(&Rc<dyn Intercept>) -> Result<()>,
) -> Result<()> {
    interceptors.iter().try_for_each(tell)
}

fn inside_out(
    interceptors: &Interceptors,
    tell: impl FnMut(&Rc<dyn Intercept>) -> Result<()>,
) -> Result<()> {
    interceptors.iter().rev().try_for_each(tell)
}

//! Runs a model: calls its units and the hooks around them.
//!
//! This is the only place that calls units, so hooks here cover the whole execution of a model. Without hooks, a run
//! is a plain loop over the units.

use std::{
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering},
};

use tch::Tensor;

use crate::{
    Context, Model, Result, Unit, UnitCall, UnitHooks,
    backward_hooks::BackwardHooks,
    unit_hooks::{Event, HookList, notify, wrapped},
};

/// A forward pass that backward may follow.
///
/// Call [`Run::backward`], which also fires the last hooks. If there are backward hooks, a plain `loss.backward()`
/// fails with an error.
#[must_use = "a run holds the output, and backward goes through it"]
pub struct Run {
    output: Tensor,
    backward_hooks: Option<Rc<BackwardHooks>>,
    /// Whether there are hooks, which must run on this thread.
    has_hooks: bool,
}

/// Runs every unit of `model` on `x` with `hooks` around each; the first hooks are outermost.
pub fn run(
    model: &dyn Model,
    x: &Tensor,
    cx: &Context,
    hooks: &[Rc<dyn UnitHooks>],
) -> Result<Run> {
    let units = model.units();
    if hooks.is_empty() {
        let output = units
            .into_iter()
            .try_fold(x.shallow_clone(), |x, unit| unit.forward(&x, cx))?;
        return Ok(Run {
            output,
            backward_hooks: None,
            has_hooks: false,
        });
    }

    let backward_hooks = BackwardHooks::begin(hooks, units.len());
    let run = next_run();
    let num_units = units.len();
    let mut output = x.shallow_clone();
    for (index, unit) in units.into_iter().enumerate() {
        let mut call = UnitCall {
            run,
            index,
            num_units,
            name: unit.name().into(),
            context: cx.clone(),
        };
        for hook in hooks {
            hook.configure(&mut call);
        }
        output = call_unit(unit, &output, call, hooks, backward_hooks.as_ref())?;
    }
    Ok(Run {
        output,
        backward_hooks,
        has_hooks: true,
    })
}

/// Calls one unit and the hooks around its forward.
fn call_unit(
    unit: &dyn Unit,
    x: &Tensor,
    call: UnitCall,
    hooks: &HookList,
    backward_hooks: Option<&Rc<BackwardHooks>>,
) -> Result<Tensor> {
    notify(hooks, Event::BeforeForward, &call)?;
    let x = match backward_hooks {
        Some(backward_hooks) => backward_hooks.wrap_input(&call, x)?,
        None => x.shallow_clone(),
    };
    let output = wrapped(hooks, &call, &x, &|x| unit.forward(x, &call.context))?;
    if let Some(backward_hooks) = backward_hooks {
        backward_hooks.hook_output(&call, &output)?;
    }
    notify(hooks, Event::AfterForward, &call)?;
    Ok(output)
}

fn next_run() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Run {
    /// The output of the last unit.
    pub fn output(&self) -> &Tensor {
        &self.output
    }

    /// The output, for a run without backward.
    pub fn into_output(self) -> Tensor {
        self.output
    }

    /// Releases the output early, for a backward that starts from the gradient of the output and does not read it.
    pub fn release_output(&mut self) {
        self.output = Tensor::new();
    }

    /// Runs backward from `loss`, which was computed from the output, and accumulates gradients.
    ///
    /// Returns the error of a hook that failed during backward.
    pub fn backward(self, loss: &Tensor) -> Result<()> {
        // Release the output before backward unless the loss needs it.
        drop(self.output);
        match self.backward_hooks {
            Some(backward_hooks) => backward_hooks.backward(loss),
            None => Ok(loss.f_backward()?),
        }
    }

    /// Runs backward interleaved with `other`: each computes while the other communicates. Hooks are bound to one
    /// thread, so with hooks the two run one after the other.
    pub fn backward_interleaved<T>(self, loss: &Tensor, other: impl FnOnce() -> T) -> Result<T> {
        if self.has_hooks {
            let output = other();
            self.backward(loss)?;
            return Ok(output);
        }
        drop(self.output);
        let loss = loss.shallow_clone();
        let (output, result) = trainyard_torch::interleave(other, move || loss.f_backward())?;
        result?;
        Ok(output)
    }
}

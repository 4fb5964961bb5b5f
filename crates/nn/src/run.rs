//! Running a model: the one call site of units.
//!
//! Everything a strategy does to a model's execution, it does here. A run without interceptors is
//! a plain loop over the units.

use std::{
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering},
};

use tch::Tensor;

use crate::{
    Context, Intercept, Model, Result, Unit, UnitCall,
    intercept::{Event, Interceptors, tell, wrapped},
    tape::Tape,
};

/// A forward pass that backward may follow.
///
/// Backward goes through [`Run::backward`], which tells the interceptors of the last events too.
/// Where interceptors watch, a plain `loss.backward()` is refused with an error that says so.
#[must_use = "a run holds the output, and backward goes through it"]
pub struct Run {
    output: Tensor,
    tape: Option<Rc<Tape>>,
    /// Whether anything that belongs to this thread takes part in backward.
    is_bound: bool,
}

/// Runs every unit of `model` on `x`, each inside the interceptors, the first of which is outermost.
pub fn run(
    model: &dyn Model,
    x: &Tensor,
    cx: &Context,
    interceptors: &[Rc<dyn Intercept>],
) -> Result<Run> {
    let units = model.units();
    if interceptors.is_empty() {
        let output = units
            .into_iter()
            .try_fold(x.shallow_clone(), |x, unit| unit.forward(&x, cx))?;
        return Ok(Run {
            output,
            tape: None,
            is_bound: false,
        });
    }

    let tape = Tape::begin(interceptors, units.len());
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
        for interceptor in interceptors {
            interceptor.adjust(&mut call);
        }
        output = pass(unit, &output, call, interceptors, tape.as_ref())?;
    }
    Ok(Run {
        output,
        tape,
        is_bound: true,
    })
}

/// One passage through one unit.
fn pass(
    unit: &dyn Unit,
    x: &Tensor,
    call: UnitCall,
    interceptors: &Interceptors,
    tape: Option<&Rc<Tape>>,
) -> Result<Tensor> {
    tell(interceptors, Event::BeforeForward, &call)?;
    let x = match tape {
        Some(tape) => tape.enter(&call, x)?,
        None => x.shallow_clone(),
    };
    let output = wrapped(interceptors, &call, &x, &|x| unit.forward(x, &call.context))?;
    if let Some(tape) = tape {
        tape.leave(&call, &output)?;
    }
    tell(interceptors, Event::AfterForward, &call)?;
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

    /// The output alone, where no backward will follow.
    pub fn into_output(self) -> Tensor {
        self.output
    }

    /// Lets go of the output, where backward begins with its gradient and nobody reads it any more.
    pub fn release_output(&mut self) {
        self.output = Tensor::new();
    }

    /// Accumulates the gradients of `loss`, which was computed from the output.
    ///
    /// An error raised by an interceptor during backward comes out here.
    pub fn backward(self, loss: &Tensor) -> Result<()> {
        // The output is held no longer than the loss itself needs it.
        drop(self.output);
        match self.tape {
            Some(tape) => tape.backward(loss),
            None => Ok(loss.f_backward()?),
        }
    }

    /// The same while `other` runs: each computes while the other communicates. Interceptors belong to
    /// one thread, so where there are any, one comes after the other.
    pub fn backward_beside<T>(self, loss: &Tensor, other: impl FnOnce() -> T) -> Result<T> {
        if self.is_bound {
            let done = other();
            self.backward(loss)?;
            return Ok(done);
        }
        drop(self.output);
        let loss = loss.shallow_clone();
        let (done, passed) = trainyard_torch::beside(other, move || loss.f_backward())?;
        passed?;
        Ok(done)
    }
}

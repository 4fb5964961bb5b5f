//! Activation recomputation: backward runs a segment of the model again instead of saving its activations.

use std::cell::Cell;
use std::rc::Rc;

use tch::Tensor;
use trainyard_torch::{TorchError, autograd};

use crate::{Result, ThreadBound};

/// A segment of a model that backward can run again.
pub type RecomputeFn = Rc<dyn Fn(&Tensor) -> Result<Tensor>>;

/// Runs `segment` on `x` and saves only `x`, like PyTorch's activation checkpointing: backward runs the segment again
/// before its backward.
///
/// Both runs must compute the same, so randomness must come from the context and not from a generator. If `x`
/// requires no gradient, the segment runs once.
pub fn recompute(x: &Tensor, segment: RecomputeFn) -> Result<Tensor> {
    if !x.requires_grad() || !is_recording(x)? {
        return segment(x);
    }
    let again = ThreadBound::new(Rc::clone(&segment));
    Ok(autograd::apply(
        &[x],
        |saver, inputs| {
            saver.save(inputs[0]);
            segment(inputs[0]).map_err(to_torch_error)
        },
        move |saved, gradients| {
            let ([x], [Some(gradient)]) = (saved, gradients) else {
                return Ok(vec![None]);
            };
            let segment = again.get().map_err(to_torch_error)?;
            let x = x.f_detach()?.f_set_requires_grad(true)?;
            let again = || tch::with_grad(|| segment(&x));
            let output = while_recomputing(again).map_err(to_torch_error)?;
            autograd::backward(&[&output], &[gradient])?;
            let gradient = x.f_grad()?;
            Ok(vec![gradient.defined().then_some(gradient)])
        },
    )?)
}

thread_local! {
    static IS_RECOMPUTING: Cell<bool> = const { Cell::new(false) };
}

/// Whether backward is running a segment again on this thread: a layer that counts what it has seen has seen this input
/// before.
pub fn is_recomputing() -> bool {
    IS_RECOMPUTING.get()
}

fn while_recomputing<T>(run: impl FnOnce() -> T) -> T {
    let outer = IS_RECOMPUTING.replace(true);
    let output = run();
    IS_RECOMPUTING.set(outer);
    output
}

/// Whether autograd records operations on `x` now.
pub(crate) fn is_recording(x: &Tensor) -> Result<bool, TorchError> {
    Ok(x.f_alias()?.requires_grad())
}

/// Converts an error to one that can cross libtorch, which keeps only its text.
fn to_torch_error(error: impl ToString) -> TorchError {
    TorchError::Other(error.to_string())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tch::{Device, Kind};

    use super::*;

    fn gradients(x: &Tensor, weight: &Tensor, y: &Tensor) -> (Tensor, Tensor) {
        y.square().sum(Kind::Double).backward();
        let found = (x.grad().copy(), weight.grad().copy());
        autograd::clear_grad(x).unwrap();
        autograd::clear_grad(weight).unwrap();
        found
    }

    #[test]
    fn gradients_are_the_same_and_the_part_runs_twice() -> Result<()> {
        let options = (Kind::Double, Device::Cpu);
        let x = Tensor::randn([3, 4], options).set_requires_grad(true);
        let weight = Tensor::randn([4, 4], options).set_requires_grad(true);
        let runs = Rc::new(Cell::new(0));
        let segment: RecomputeFn = {
            let (weight, runs) = (weight.shallow_clone(), Rc::clone(&runs));
            Rc::new(move |x| {
                runs.set(runs.get() + 1);
                Ok(x.f_matmul(&weight)?.f_tanh()?)
            })
        };
        let plain = gradients(&x, &weight, &segment(&x)?);
        assert_eq!(runs.get(), 1);
        let y = recompute(&x, Rc::clone(&segment))?;
        assert_eq!(runs.get(), 2);
        let again = gradients(&x, &weight, &y);
        assert_eq!(runs.get(), 3);
        assert!(plain.0.equal(&again.0) && plain.1.equal(&again.1));

        let y = tch::no_grad(|| recompute(&x, segment))?;
        assert!(!y.requires_grad());
        Ok(())
    }
}

//! Computing a part of the model twice instead of keeping what its backward needs.

use std::rc::Rc;

use tch::Tensor;
use trainyard_torch::{TorchError, autograd};

use crate::{Result, ThreadBound};

/// A part of a model that can be run again.
pub type Part = Rc<dyn Fn(&Tensor) -> Result<Tensor>>;

/// `part` of `x`, of which only `x` is kept: backward runs the part again, and then its backward.
///
/// The second run must compute what the first did, so randomness has to come from the context, not
/// from a generator. Where `x` needs no gradient the part runs once, since nothing would call it back.
pub fn recomputed(x: &Tensor, part: Part) -> Result<Tensor> {
    if !x.requires_grad() || !is_recording(x)? {
        return part(x);
    }
    let again = ThreadBound::new(Rc::clone(&part));
    Ok(autograd::single(
        &[x],
        |saver, inputs| {
            saver.save(inputs[0]);
            part(inputs[0]).map_err(carried)
        },
        move |saved, gradients| {
            let ([x], [Some(gradient)]) = (saved, gradients) else {
                return Ok(vec![None]);
            };
            let part = again.get().map_err(carried)?;
            let x = x.f_detach()?.f_set_requires_grad(true)?;
            let output = tch::with_grad(|| part(&x)).map_err(carried)?;
            autograd::backward(&[&output], &[gradient])?;
            let gradient = x.f_grad()?;
            Ok(vec![gradient.defined().then_some(gradient)])
        },
    )?)
}

/// Whether operations on `x` are recorded for backward.
fn is_recording(x: &Tensor) -> Result<bool> {
    Ok(x.f_alias()?.requires_grad())
}

/// The text of an error, as libtorch can carry it.
fn carried(error: impl ToString) -> TorchError {
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
        let part: Part = {
            let (weight, runs) = (weight.shallow_clone(), Rc::clone(&runs));
            Rc::new(move |x| {
                runs.set(runs.get() + 1);
                Ok(x.f_matmul(&weight)?.f_tanh()?)
            })
        };
        let plain = gradients(&x, &weight, &part(&x)?);
        assert_eq!(runs.get(), 1);
        let y = recomputed(&x, Rc::clone(&part))?;
        assert_eq!(runs.get(), 2);
        let again = gradients(&x, &weight, &y);
        assert_eq!(runs.get(), 3);
        assert!(plain.0.equal(&again.0) && plain.1.equal(&again.1));

        let y = tch::no_grad(|| recomputed(&x, part))?;
        assert!(!y.requires_grad());
        Ok(())
    }
}

//! Gradients of weights, put off.
//!
//! The stage before waits for the gradient of a unit's input, and nobody for those of its weights. A
//! pass that is run with [`allowing`] can have its backward run with [`deferring`]: linear maps then
//! pass on their input's gradient and leave a debt, which [`Debts::pay`] settles later. One pass of
//! autograd and one of plain products; two passes of autograd would cost double.
//!
//! Layers without this compute all their gradients at once, as always.

use std::cell::{Cell, RefCell};

use tch::Tensor;
use trainyard_torch::{TorchError, autograd};

use crate::Result;

thread_local! {
    static ALLOWED: Cell<bool> = const { Cell::new(false) };
    static OWED: RefCell<Option<Vec<Debt>>> = const { RefCell::new(None) };
}

/// A product `rowsᵀ · input` that is to be added to a weight's gradient.
pub(crate) struct Debt {
    pub weight: Tensor,
    pub rows: Tensor,
    pub input: Tensor,
}

/// Gradients of weights that are still to be computed.
#[must_use = "weights have no gradient before their debts are paid"]
#[derive(Default)]
pub struct Debts(Vec<Debt>);

impl Debts {
    /// Computes the gradients, as backward would have.
    pub fn pay(self) -> Result<()> {
        for Debt {
            weight,
            rows,
            input,
        } in self.0
        {
            let gradient = tch::no_grad(|| rows.f_transpose(0, 1)?.f_mm(&input))?;
            autograd::backward(&[&weight], &[&gradient])?;
        }
        Ok(())
    }

    /// How many weights wait.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none does.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Runs a forward pass whose backward may put gradients of weights off.
pub fn allowing<T>(forward: impl FnOnce() -> T) -> T {
    let before = ALLOWED.replace(true);
    let output = forward();
    ALLOWED.set(before);
    output
}

/// Runs a backward pass that puts gradients of weights off; returns them.
pub fn deferring<T>(backward: impl FnOnce() -> T) -> (T, Debts) {
    let before = OWED.replace(Some(Vec::new()));
    let output = backward();
    let owed = OWED.replace(before).unwrap_or_default();
    (output, Debts(owed))
}

/// Whether this forward pass is one whose backward may put things off.
pub(crate) fn is_allowed() -> bool {
    ALLOWED.get()
}

/// Whether this backward pass puts things off.
pub(crate) fn is_deferring() -> bool {
    OWED.with_borrow(Option::is_some)
}

/// Puts a gradient off.
pub(crate) fn owe(debt: Debt) {
    OWED.with_borrow_mut(|owed| owed.get_or_insert_default().push(debt));
}

/// `x · weightᵀ` with a backward that can put the weight's gradient off.
pub(crate) fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let graph = weight.shallow_clone();
    let mut outputs = autograd::function(
        &[x, weight],
        |saver, inputs| {
            saver.save(inputs[0]);
            saver.save(inputs[1]);
            Ok(vec![inputs[0].f_linear(inputs[1], None::<&Tensor>)?])
        },
        move |saved, gradients| {
            let ([x, weight], [Some(gradient)]) = (saved, gradients) else {
                return Ok(vec![None, None]);
            };
            let (input, rows) = (flat(x)?, flat(gradient)?);
            let d_x = rows.f_mm(weight)?.f_view(&x.size()[..])?;
            if !is_deferring() {
                return Ok(vec![Some(d_x), Some(rows.f_transpose(0, 1)?.f_mm(&input)?)]);
            }
            owe(Debt {
                weight: graph.shallow_clone(),
                rows,
                input,
            });
            Ok(vec![Some(d_x), None])
        },
    )?;
    Ok(outputs.swap_remove(0))
}

/// One row per position.
fn flat(tensor: &Tensor) -> Result<Tensor, TorchError> {
    let width = tensor.size().last().copied().unwrap_or(1);
    Ok(tensor.f_reshape([-1, width])?)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn what_is_put_off_and_paid_is_what_backward_computes() -> Result<()> {
        let options = (Kind::Double, Device::Cpu);
        let x = Tensor::randn([2, 3, 4], options).set_requires_grad(true);
        let weight = Tensor::randn([5, 4], options).set_requires_grad(true);
        let loss = |y: Tensor| y.square().sum(Kind::Double);
        loss(x.linear(&weight, None::<&Tensor>)).backward();
        let (d_x, d_weight) = (x.grad().copy(), weight.grad().copy());
        autograd::clear_grad(&x)?;
        autograd::clear_grad(&weight)?;

        let total = loss(linear(&x, &weight)?);
        let ((), debts) = deferring(|| total.backward());
        assert!(x.grad().allclose(&d_x, 1e-12, 1e-12, false));
        assert!(!weight.grad().defined());
        assert_eq!(debts.len(), 1);
        debts.pay()?;
        assert!(weight.grad().allclose(&d_weight, 1e-12, 1e-12, false));
        Ok(())
    }
}

//! When and how the gradients of weights are computed.
//!
//! The stage before waits for the gradient of a unit's input, and nobody for those of its weights. A
//! pass that runs forward within [`WeightGradients::during`] leaves a choice to its backward:
//!
//! - [`WeightGradients::put_off`]: linear maps pass on their input's gradient and leave a debt, which
//!   [`WeightGradients::pay`] settles later. One pass of autograd and one of plain products; two
//!   passes of autograd would cost double.
//! - [`WeightGradients::add_in_place`]: where earlier passes have left a gradient, the product is added
//!   to it by the multiplication itself, which saves writing and reading a matrix as large as the
//!   weight. Nobody hears of such a gradient, so it is for passes after which nobody waits.
//!
//! Layers without this compute all their gradients at once, as always.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard};

use tch::Tensor;
use trainyard_torch::{TorchError, autograd};

use crate::Result;

thread_local! {
    /// Those of the forward pass under way.
    static CURRENT: RefCell<Option<WeightGradients>> = const { RefCell::new(None) };
}

/// The gradients of the weights of one pass.
#[derive(Clone, Default)]
pub struct WeightGradients(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    how: How,
    owed: Vec<Debt>,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum How {
    #[default]
    AtOnce,
    InPlace,
    PutOff,
}

/// A product `rowsᵀ · input` that is to be added to a weight's gradient.
struct Debt {
    weight: Tensor,
    rows: Tensor,
    input: Tensor,
}

impl WeightGradients {
    /// Runs a forward pass whose backward has the choice.
    pub fn during<T>(&self, forward: impl FnOnce() -> T) -> T {
        let before = CURRENT.replace(Some(self.clone()));
        let output = forward();
        CURRENT.set(before);
        output
    }

    /// Backward leaves the weights to [`WeightGradients::pay`].
    pub fn put_off(&self) {
        self.lock().how = How::PutOff;
    }

    /// Backward adds to gradients that are there.
    pub fn add_in_place(&self) {
        self.lock().how = How::InPlace;
    }

    /// Computes the gradients that are owed, as backward would have, or in place.
    pub fn pay(&self) -> Result<()> {
        let owed = std::mem::take(&mut self.lock().owed);
        for Debt {
            weight,
            rows,
            input,
        } in owed
        {
            if add_in_place(&weight, &rows, &input)? {
                continue;
            }
            let gradient = tch::no_grad(|| rows.f_transpose(0, 1)?.f_mm(&input))?;
            autograd::backward(&[&weight], &[&gradient])?;
        }
        Ok(())
    }

    /// How many weights wait.
    pub fn num_owed(&self) -> usize {
        self.lock().owed.len()
    }

    /// A panic while the list was held left nothing half done.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Whether this forward pass is one whose backward has the choice.
pub(crate) fn has_choice() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

/// A weight in a pass whose backward has the choice, as autograd knows it.
pub(crate) struct Choice {
    weight: Tensor,
    gradients: WeightGradients,
}

/// What a layer's backward needs to choose for `weight`, where it may.
pub(crate) fn choice(weight: &Tensor) -> Option<Choice> {
    let gradients = CURRENT.with_borrow(Clone::clone)?;
    Some(Choice {
        weight: weight.shallow_clone(),
        gradients,
    })
}

/// The gradient `rowsᵀ · input` of a weight; none where it is put off, or was added already.
pub(crate) fn weight_gradient(
    rows: Tensor,
    input: &Tensor,
    choice: Option<&Choice>,
) -> Result<Option<Tensor>, TorchError> {
    if let Some(Choice { weight, gradients }) = choice {
        let mut state = gradients.lock();
        if state.how == How::PutOff {
            state.owed.push(Debt {
                weight: weight.shallow_clone(),
                input: input.shallow_clone(),
                rows,
            });
            return Ok(None);
        }
        if state.how == How::InPlace && add_in_place(weight, &rows, input)? {
            return Ok(None);
        }
    }
    Ok(Some(rows.f_transpose(0, 1)?.f_mm(input)?))
}

/// Adds `rowsᵀ · input` to the gradient a weight has; whether it has one.
fn add_in_place(weight: &Tensor, rows: &Tensor, input: &Tensor) -> Result<bool, TorchError> {
    let Some(mut gradient) = gradient_of(weight)?.filter(|g| g.kind() == rows.kind()) else {
        return Ok(false);
    };
    let _ = tch::no_grad(|| gradient.f_addmm_(&rows.f_transpose(0, 1)?, input))?;
    Ok(true)
}

/// What earlier passes have left on a parameter itself; a value computed from one has no gradient.
fn gradient_of(weight: &Tensor) -> Result<Option<Tensor>, TorchError> {
    if !weight.is_leaf() {
        return Ok(None);
    }
    let gradient = weight.f_grad()?;
    Ok(gradient.defined().then_some(gradient))
}

/// Rows of a table whose backward can add to the gradient that is there, row by row; a whole table of
/// zeros is made otherwise.
pub(crate) fn rows_of(table: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    const NO_PADDING: i64 = -1;
    let look_up = |table: &Tensor| Tensor::f_embedding(table, tokens, NO_PADDING, false, false);
    let Some(choice) = choice(table) else {
        return Ok(look_up(table)?);
    };
    let tokens = tokens.shallow_clone();
    Ok(autograd::single(
        &[table],
        |_, inputs| Ok(look_up(inputs[0])?),
        move |_, gradients| {
            let [Some(gradient)] = gradients else {
                return Ok(vec![None]);
            };
            let table = &choice.weight;
            let is_at_once = choice.gradients.lock().how == How::AtOnce;
            let there = gradient_of(table)?.filter(|g| !is_at_once && g.kind() == gradient.kind());
            let num_rows = table.size().first().copied().unwrap_or(0);
            Ok(vec![match there {
                Some(mut there) => {
                    let (tokens, rows) = (tokens.f_view(-1i64)?, flat(gradient)?);
                    let _ = tch::no_grad(|| there.f_index_add_(0, &tokens, &rows))?;
                    None
                }
                None => Some(Tensor::f_embedding_dense_backward(
                    gradient, &tokens, num_rows, NO_PADDING, false,
                )?),
            }])
        },
    )?)
}

/// `x · weightᵀ` with a backward that can put the weight's gradient off.
pub(crate) fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let choice = choice(weight);
    Ok(autograd::single(
        &[x, weight],
        |saver, inputs| {
            saver.save(inputs[0]);
            saver.save(inputs[1]);
            Ok(inputs[0].f_linear(inputs[1], None::<&Tensor>)?)
        },
        move |saved, gradients| {
            let ([x, weight], [Some(gradient)]) = (saved, gradients) else {
                return Ok(vec![None, None]);
            };
            let rows = flat(gradient)?;
            let d_x = rows.f_mm(weight)?.f_view(&x.size()[..])?;
            let d_weight = weight_gradient(rows, &flat(x)?, choice.as_ref())?;
            Ok(vec![Some(d_x), d_weight])
        },
    )?)
}

/// One row per position.
pub(crate) fn flat(tensor: &Tensor) -> Result<Tensor, TorchError> {
    let width = tensor.size().last().copied().unwrap_or(1).max(1);
    Ok(tensor.f_reshape([-1, width])?)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    const OPTIONS: (Kind, Device) = (Kind::Double, Device::Cpu);

    fn loss(y: Tensor) -> Tensor {
        y.square().sum(Kind::Double)
    }

    fn close(a: &Tensor, b: &Tensor) -> bool {
        a.allclose(b, 1e-12, 1e-12, false)
    }

    #[test]
    fn what_is_put_off_and_paid_is_what_backward_computes() -> Result<()> {
        let x = Tensor::randn([2, 3, 4], OPTIONS).set_requires_grad(true);
        let weight = Tensor::randn([5, 4], OPTIONS).set_requires_grad(true);
        loss(x.linear(&weight, None::<&Tensor>)).backward();
        let (d_x, d_weight) = (x.grad().copy(), weight.grad().copy());
        autograd::clear_grad(&x)?;
        autograd::clear_grad(&weight)?;

        let gradients = WeightGradients::default();
        let total = loss(gradients.during(|| linear(&x, &weight))?);
        gradients.put_off();
        total.backward();
        assert!(close(&x.grad(), &d_x));
        assert!(!weight.grad().defined());
        assert_eq!(gradients.num_owed(), 1);
        gradients.pay()?;
        assert!(close(&weight.grad(), &d_weight));
        Ok(())
    }

    #[test]
    fn what_is_added_in_place_is_what_autograd_adds() -> Result<()> {
        let x = Tensor::randn([2, 3, 4], OPTIONS);
        let tokens = Tensor::from_slice(&[1i64, 4, 1, 0]).view([2, 2]);
        let (weight, table) = (
            Tensor::randn([5, 4], OPTIONS),
            Tensor::randn([6, 3], OPTIONS),
        );
        let (weight, table) = (
            weight.set_requires_grad(true),
            table.set_requires_grad(true),
        );
        for _ in 0..3 {
            loss(x.linear(&weight, None::<&Tensor>)).backward();
            loss(Tensor::embedding(&table, &tokens, -1, false, false)).backward();
        }
        let expected = [&weight, &table].map(|leaf| leaf.grad().copy());
        autograd::clear_grad(&weight)?;
        autograd::clear_grad(&table)?;

        for _ in 0..3 {
            let gradients = WeightGradients::default();
            let mapped = gradients.during(|| linear(&x, &weight))?;
            let looked_up = gradients.during(|| rows_of(&table, &tokens))?;
            gradients.add_in_place();
            loss(mapped).backward();
            loss(looked_up).backward();
        }
        assert!(close(&weight.grad(), &expected[0]));
        assert!(close(&table.grad(), &expected[1]));
        Ok(())
    }
}

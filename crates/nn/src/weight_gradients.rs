//! Controls when and how the gradients of weights are computed, as zero-bubble pipeline schedules need.
//!
//! The previous pipeline stage waits for the gradient of a unit's input, but no stage waits for the gradients of its
//! weights. A forward pass that runs within [`WeightGradients::record`] lets its backward choose:
//!
//! - [`WeightGradients::defer`]: linear layers compute the gradient of their input only, and
//!   [`WeightGradients::compute`] computes the weight gradients later (the W pass). This costs one autograd pass and
//!   one matrix product per weight; two autograd passes would cost twice as much.
//! - [`WeightGradients::add_in_place`]: if a weight has a gradient already, the matrix product accumulates into it
//!   directly, which saves writing and reading a matrix of the size of the weight. No hook fires for such a gradient,
//!   so this is only for micro-batches after which gradients are not synchronized.
//!
//! Layers that do not support this compute their gradients in backward as usual.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard};

use tch::Tensor;
use trainyard_torch::{TorchError, autograd};

use crate::Result;

thread_local! {
    /// The recorder of the forward pass that is running on this thread.
    static CURRENT: RefCell<Option<WeightGradients>> = const { RefCell::new(None) };
}

/// The weight gradients of one forward and backward pass. Clones share state.
#[derive(Clone, Default)]
pub struct WeightGradients(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    mode: Mode,
    deferred: Vec<DeferredGrad>,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum Mode {
    #[default]
    Immediate,
    InPlace,
    Deferred,
}

/// A deferred matrix product `rowsᵀ · input`, to be added to a weight's gradient.
struct DeferredGrad {
    weight: Tensor,
    rows: Tensor,
    input: Tensor,
}

impl WeightGradients {
    /// Runs a forward pass whose backward can defer weight gradients or add them in place.
    pub fn record<T>(&self, forward: impl FnOnce() -> T) -> T {
        let before = CURRENT.replace(Some(self.clone()));
        let output = forward();
        CURRENT.set(before);
        output
    }

    /// Makes backward leave weight gradients to [`WeightGradients::compute`].
    pub fn defer(&self) {
        self.lock().mode = Mode::Deferred;
    }

    /// Makes backward add to existing gradients in place.
    pub fn add_in_place(&self) {
        self.lock().mode = Mode::InPlace;
    }

    /// Computes the deferred gradients, as backward would have or in place.
    pub fn compute(&self) -> Result<()> {
        let deferred = std::mem::take(&mut self.lock().deferred);
        for DeferredGrad {
            weight,
            rows,
            input,
        } in deferred
        {
            if add_in_place(&weight, &rows, &input)? {
                continue;
            }
            let gradient = tch::no_grad(|| rows.f_transpose(0, 1)?.f_mm(&input))?;
            autograd::backward(&[&weight], &[&gradient])?;
        }
        Ok(())
    }

    /// The number of deferred weight gradients.
    pub fn num_deferred(&self) -> usize {
        self.lock().deferred.len()
    }

    /// A panic while the lock was held cannot leave a partial change.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A weight of a recorded pass whose gradient backward will compute.
struct PendingGrad {
    weight: Tensor,
    gradients: WeightGradients,
}

/// The handle that a layer's backward needs for `weight`; `None` if the pass is not recorded.
fn pending_grad(weight: &Tensor) -> Option<PendingGrad> {
    let gradients = CURRENT.with_borrow(Clone::clone)?;
    Some(PendingGrad {
        weight: weight.shallow_clone(),
        gradients,
    })
}

/// The gradient of a weight, as backward gets it.
pub(crate) struct WeightGrad {
    is_trained: bool,
    pending: Option<PendingGrad>,
}

impl WeightGrad {
    /// That of `weight` in this forward pass.
    pub(crate) fn of(weight: &Tensor) -> WeightGrad {
        WeightGrad {
            is_trained: weight.requires_grad(),
            pending: pending_grad(weight),
        }
    }

    /// The gradient `rowsᵀ · input`; `None` if the weight has none, or if it is deferred or was added in place.
    pub(crate) fn compute(
        &self,
        rows: Tensor,
        input: &Tensor,
    ) -> Result<Option<Tensor>, TorchError> {
        if !self.is_trained {
            return Ok(None);
        }
        if let Some(PendingGrad { weight, gradients }) = &self.pending {
            let mut state = gradients.lock();
            if state.mode == Mode::Deferred {
                state.deferred.push(DeferredGrad {
                    weight: weight.shallow_clone(),
                    input: input.shallow_clone(),
                    rows,
                });
                return Ok(None);
            }
            if state.mode == Mode::InPlace && add_in_place(weight, &rows, input)? {
                return Ok(None);
            }
        }
        Ok(Some(rows.f_transpose(0, 1)?.f_mm(input)?))
    }
}

/// Adds `rowsᵀ · input` to an existing gradient of a weight; returns whether there was one.
fn add_in_place(weight: &Tensor, rows: &Tensor, input: &Tensor) -> Result<bool, TorchError> {
    let Some(mut gradient) = gradient_of(weight)?.filter(|g| g.kind() == rows.kind()) else {
        return Ok(false);
    };
    let _ = tch::no_grad(|| gradient.f_addmm_(&rows.f_transpose(0, 1)?, input))?;
    Ok(true)
}

/// The gradient that earlier passes accumulated in a parameter; a tensor that is not a leaf has none.
fn gradient_of(weight: &Tensor) -> Result<Option<Tensor>, TorchError> {
    if !weight.is_leaf() {
        return Ok(None);
    }
    let gradient = weight.f_grad()?;
    Ok(gradient.defined().then_some(gradient))
}

/// An embedding lookup whose backward can add to an existing gradient row by row, instead of creating a table-sized
/// gradient of zeros.
pub(crate) fn embedding(table: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    const NO_PADDING: i64 = -1;
    let look_up = |table: &Tensor| Tensor::f_embedding(table, tokens, NO_PADDING, false, false);
    let Some(pending) = pending_grad(table) else {
        return Ok(look_up(table)?);
    };
    let tokens = tokens.shallow_clone();
    Ok(autograd::apply(
        &[table],
        |_, inputs| Ok(look_up(inputs[0])?),
        move |_, gradients| {
            let [Some(gradient)] = gradients else {
                return Ok(vec![None]);
            };
            let table = &pending.weight;
            let is_immediate = pending.gradients.lock().mode == Mode::Immediate;
            let existing =
                gradient_of(table)?.filter(|g| !is_immediate && g.kind() == gradient.kind());
            let num_rows = table.size().first().copied().unwrap_or(0);
            Ok(vec![match existing {
                Some(mut existing) => {
                    let (tokens, rows) = (tokens.f_view(-1i64)?, flat(gradient)?);
                    let _ = tch::no_grad(|| existing.f_index_add_(0, &tokens, &rows))?;
                    None
                }
                None => Some(Tensor::f_embedding_dense_backward(
                    gradient, &tokens, num_rows, NO_PADDING, false,
                )?),
            }])
        },
    )?)
}

/// `x · weightᵀ` as one autograd function, whose backward can defer the weight's gradient.
pub(crate) fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (weight_grad, x_is_trained) = (WeightGrad::of(weight), x.requires_grad());
    Ok(autograd::apply(
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
            let d_x = x_is_trained.then(|| rows.f_mm(weight)?.f_view(&x.size()[..]));
            let d_x = d_x.transpose()?;
            Ok(vec![d_x, weight_grad.compute(rows, &flat(x)?)?])
        },
    )?)
}

/// The tensor as a matrix with one row per token.
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
    fn deferred_gradients_equal_those_of_backward() -> Result<()> {
        let x = Tensor::randn([2, 3, 4], OPTIONS).set_requires_grad(true);
        let weight = Tensor::randn([5, 4], OPTIONS).set_requires_grad(true);
        loss(x.linear(&weight, None::<&Tensor>)).backward();
        let (d_x, d_weight) = (x.grad().copy(), weight.grad().copy());
        autograd::clear_grad(&x)?;
        autograd::clear_grad(&weight)?;

        let gradients = WeightGradients::default();
        let total = loss(gradients.record(|| linear(&x, &weight))?);
        gradients.defer();
        total.backward();
        assert!(close(&x.grad(), &d_x));
        assert!(!weight.grad().defined());
        assert_eq!(gradients.num_deferred(), 1);
        gradients.compute()?;
        assert!(close(&weight.grad(), &d_weight));
        Ok(())
    }

    #[test]
    fn gradients_added_in_place_equal_those_of_autograd() -> Result<()> {
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
            let mapped = gradients.record(|| linear(&x, &weight))?;
            let looked_up = gradients.record(|| embedding(&table, &tokens))?;
            gradients.add_in_place();
            loss(mapped).backward();
            loss(looked_up).backward();
        }
        assert!(close(&weight.grad(), &expected[0]));
        assert!(close(&table.grad(), &expected[1]));
        Ok(())
    }
}

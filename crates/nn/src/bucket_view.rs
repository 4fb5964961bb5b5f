//! A parameter's part of a bucket of gradients, into which backward casts the gradient, like PyTorch's
//! `gradient_as_bucket_view`.
//!
//! Backward may write into the view only if this is all of the gradient: with a parameter that is cast twice, a second
//! gradient could arrive while autograd still holds the first, so both get memory of their own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};
use trainyard_torch::{TorchError, autograd};

use crate::recompute::is_recording;

/// The view of a bucket that backward may write a gradient into. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct BucketView(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    view: Option<Tensor>,
    /// Casts of the parameter that autograd has recorded since the last gradient.
    num_casts: usize,
}

impl BucketView {
    /// Sets the view for the backward pass that begins; `None` if the parameter has a gradient already.
    pub fn set(&self, view: Option<Tensor>) {
        self.lock().view = view;
    }

    /// Removes the view, because the parameter has a gradient now, or the bucket is gone.
    pub fn clear(&self) {
        *self.lock() = State::default();
    }

    /// The view, if the parameter was cast once, and only to the first caller.
    fn take(&self) -> Option<Tensor> {
        let mut state = self.lock();
        let is_whole = state.num_casts == 1;
        state.view.take().filter(|_| is_whole)
    }

    /// A panic while the lock was held cannot leave a partial change.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Casts a parameter to `kind` within autograd. Backward casts the gradient into the bucket.
    pub(crate) fn cast(&self, parameter: &Tensor, kind: Kind) -> Result<Tensor, TorchError> {
        if is_recording(parameter)? {
            self.lock().num_casts += 1;
        }
        let (own_kind, view) = (parameter.kind(), self.clone());
        autograd::apply(
            &[parameter],
            |_, inputs| Ok(inputs[0].f_to_kind(kind)?),
            move |_, gradients| {
                let [Some(gradient)] = gradients else {
                    return Ok(vec![None]);
                };
                Ok(vec![Some(match view.take() {
                    // Autograd keeps a tensor with no other reference as the leaf's gradient, without a copy.
                    Some(view) => written(view, gradient)?,
                    None => gradient.f_to_kind(own_kind)?,
                })])
            },
        )
    }
}

fn written(mut view: Tensor, gradient: &Tensor) -> Result<Tensor, TorchError> {
    view.f_copy_(gradient)?;
    Ok(view)
}

#[cfg(test)]
mod tests {
    use tch::Device;
    use trainyard_torch::storage;

    use super::*;

    fn bucket_and_leaf() -> (Tensor, Tensor) {
        let options = (Kind::Float, Device::Cpu);
        let leaf = Tensor::ones([3], options).set_requires_grad(true);
        (Tensor::full([3], 7.0, options), leaf)
    }

    #[test]
    fn backward_writes_the_gradient_into_the_bucket() -> Result<(), TorchError> {
        let (bucket, leaf) = bucket_and_leaf();
        let view = BucketView::default();
        let value = view.cast(&leaf, Kind::BFloat16)?;
        view.set(Some(bucket.f_detach()?));
        (value * 2.0).sum(Kind::Float).backward();
        assert!(storage::is_shared(&leaf.grad(), &bucket)?);
        assert_eq!(Vec::<f32>::try_from(&bucket)?, [2.0; 3]);
        Ok(())
    }

    #[test]
    fn gradients_of_two_casts_are_added_outside_of_the_bucket() -> Result<(), TorchError> {
        let (bucket, leaf) = bucket_and_leaf();
        let view = BucketView::default();
        let (once, again) = (
            view.cast(&leaf, Kind::BFloat16)?,
            view.cast(&leaf, Kind::BFloat16)?,
        );
        let unrecorded = tch::no_grad(|| view.cast(&leaf, Kind::BFloat16))?;
        assert!(!unrecorded.requires_grad());
        view.set(Some(bucket.f_detach()?));
        (once * 2.0 + again * 3.0).sum(Kind::Float).backward();
        assert_eq!(Vec::<f32>::try_from(leaf.grad())?, [5.0; 3]);
        assert_eq!(Vec::<f32>::try_from(&bucket)?, [7.0; 3]);
        Ok(())
    }
}

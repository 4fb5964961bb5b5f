//! Where the next gradient of a parameter belongs, so that backward writes it there instead of copying it later.

use std::sync::{Arc, Mutex, PoisonError};

use tch::{Kind, Tensor};
use trainyard_torch::{TorchError, autograd};

/// A parameter's part of a bucket of gradients, offered to the next backward pass. Clones share the offer.
///
/// Whoever computes the gradient takes the offer, so a parameter that is used twice in a pass gets its second gradient in
/// memory of its own, and autograd adds the two.
#[derive(Clone, Debug, Default)]
pub struct BucketView(Arc<Mutex<Option<Tensor>>>);

impl BucketView {
    /// Offers `view` to the next gradient; `None` withdraws an offer.
    pub fn offer(&self, view: Option<Tensor>) {
        *self.lock() = view;
    }

    fn take(&self) -> Option<Tensor> {
        self.lock().take()
    }

    /// A panic while the lock was held cannot leave a partial change.
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Tensor>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Casts a parameter to `kind` within autograd. Backward casts the gradient into the bucket.
    pub(crate) fn cast(&self, parameter: &Tensor, kind: Kind) -> Result<Tensor, TorchError> {
        let (own_kind, view) = (parameter.kind(), self.clone());
        autograd::apply(
            &[parameter],
            |_, inputs| Ok(inputs[0].f_to_kind(kind)?),
            move |_, gradients| {
                let [Some(gradient)] = gradients else {
                    return Ok(vec![None]);
                };
                Ok(vec![Some(match view.take() {
                    // Autograd keeps a tensor that nobody else refers to as the leaf's gradient.
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

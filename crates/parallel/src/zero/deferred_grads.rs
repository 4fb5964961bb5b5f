//! Unsharded gradients of a unit whose reduction is deferred to the end of several passes.

use tch::Tensor;
use trainyard_torch::{Result, autograd, storage};

/// A flat gradient to which passes add, and which of its members have been set.
pub(super) struct DeferredGrads {
    /// The unsharded flat gradient, in the type in which it is reduced.
    pub flat: Tensor,
    /// Each member's view of the flat gradient.
    views: Vec<Tensor>,
    is_set: Vec<bool>,
}

impl DeferredGrads {
    /// A flat gradient of zeros, and each member's view of it.
    pub(super) fn new(flat: Tensor, views: Vec<Tensor>) -> DeferredGrads {
        DeferredGrads {
            is_set: vec![false; views.len()],
            views,
            flat,
        }
    }

    /// Adds the gradient of a leaf. If types are equal, the leaf's gradient becomes the view, so that autograd
    /// accumulates later ones in place.
    pub(super) fn add(&mut self, member: usize, leaf: &Tensor) -> Result<()> {
        let (gradient, mut view) = (leaf.f_grad()?, self.views[member].shallow_clone());
        if !gradient.defined() || storage::is_shared(&gradient, &view)? {
            return Ok(());
        }
        let was_set = std::mem::replace(&mut self.is_set[member], true);
        tch::no_grad(|| {
            if was_set {
                view.f_add_(&gradient).map(drop)
            } else {
                view.f_copy_(&gradient)
            }
        })?;
        if gradient.kind() == view.kind() {
            autograd::set_grad(leaf, &view)
        } else {
            autograd::clear_grad(leaf)
        }
    }
}

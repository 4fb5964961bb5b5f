//! Gradients of a unit that are held whole until they are reduced together.

use tch::Tensor;
use trainyard_torch::{Result, autograd, storage};

/// A row of gradients to which passes add, and which of its members have come.
pub(super) struct Kept {
    /// The whole row, in the type in which it is reduced.
    pub row: Tensor,
    places: Vec<Tensor>,
    has_come: Vec<bool>,
}

impl Kept {
    /// A row of zeros, and each member's place in it.
    pub(super) fn new(row: Tensor, places: Vec<Tensor>) -> Kept {
        Kept {
            has_come: vec![false; places.len()],
            places,
            row,
        }
    }

    /// Adds the gradient a leaf has. Where types are equal autograd adds the next ones here itself.
    pub(super) fn add(&mut self, member: usize, leaf: &Tensor) -> Result<()> {
        let (gradient, mut place) = (leaf.f_grad()?, self.places[member].shallow_clone());
        if !gradient.defined() || storage::is_shared(&gradient, &place)? {
            return Ok(());
        }
        let came_before = std::mem::replace(&mut self.has_come[member], true);
        tch::no_grad(|| match came_before {
            true => place.f_add_(&gradient).map(drop),
            false => place.f_copy_(&gradient),
        })?;
        match gradient.kind() == place.kind() {
            true => autograd::set_grad(leaf, &place),
            false => autograd::clear_grad(leaf),
        }
    }
}

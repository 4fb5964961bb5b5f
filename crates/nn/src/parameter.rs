//! A parameter: one tensor of the model, known by the same name and shape on every rank.
//!
//! What a rank holds of it follows from the layout alone. Optimisers work on [`Parameter::tensor`],
//! the master copy; layers compute with [`Parameter::value`], which may have a smaller kind.

use std::{
    cell::{Cell, RefCell},
    fmt,
    rc::Rc,
};

use tch::{Kind, Tensor};
use trainyard_mesh::Layout;
use trainyard_torch::Group;

use crate::Result;

/// A named tensor that is trained. Cloning shares it.
#[derive(Clone)]
pub struct Parameter(Rc<Inner>);

struct Inner {
    name: String,
    shape: Vec<usize>,
    layout: Cell<Layout>,
    tensor: Tensor,
    /// Where a strategy has put the gradient, if not on the leaf.
    gradient: RefCell<Option<Tensor>>,
    compute_kind: Kind,
    terms: Option<Group>,
}

/// What a builder knows of a parameter beside its tensor.
pub(crate) struct Plan {
    pub name: String,
    /// The global shape.
    pub shape: Vec<usize>,
    pub layout: Layout,
    pub compute_kind: Kind,
    pub terms: Option<Group>,
}

impl Parameter {
    /// A parameter over a leaf tensor that exists already; its shape is the global one.
    pub fn from_tensor(name: impl Into<String>, tensor: Tensor) -> Result<Parameter> {
        let kind = tensor.f_kind()?;
        Parameter::computing_in(kind, name, tensor)
    }

    /// The same, cast to `compute_kind` whenever a layer reads it.
    pub fn computing_in(
        compute_kind: Kind,
        name: impl Into<String>,
        tensor: Tensor,
    ) -> Result<Parameter> {
        let plan = Plan {
            name: name.into(),
            shape: shape_of(&tensor),
            layout: Layout::replicated(),
            compute_kind,
            terms: None,
        };
        Ok(Parameter::planned(plan, tensor))
    }

    /// A parameter over what this rank holds of it.
    pub(crate) fn planned(plan: Plan, tensor: Tensor) -> Parameter {
        Parameter(Rc::new(Inner {
            name: plan.name,
            shape: plan.shape,
            layout: Cell::new(plan.layout),
            tensor,
            gradient: RefCell::default(),
            compute_kind: plan.compute_kind,
            terms: plan.terms,
        }))
    }

    /// What this rank holds of the parameter, under its name: `tensor` is cut from it as `layout`
    /// says. Optimisers train this one, and layers go on computing with the other.
    pub fn shard(&self, tensor: Tensor, layout: Layout) -> Result<Parameter> {
        let plan = Plan {
            name: self.0.name.clone(),
            shape: self.0.shape.clone(),
            layout,
            compute_kind: tensor.f_kind()?,
            terms: self.0.terms.clone(),
        };
        Ok(Parameter::planned(plan, tensor))
    }

    /// The global name, in Hugging Face's manner: `model.layers.0.mlp.up_proj.weight`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The global shape, whatever a rank holds of it.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// How many elements the global shape has.
    pub fn num_elements(&self) -> u64 {
        self.0.shape.iter().map(|&length| length as u64).product()
    }

    /// How the mesh divides it.
    pub fn layout(&self) -> Layout {
        self.0.layout.get()
    }

    /// Records how a strategy has divided it.
    pub fn set_layout(&self, layout: Layout) {
        self.0.layout.set(layout);
    }

    /// The leaf of autograd: what gradients accumulate on and optimisers update.
    pub fn tensor(&self) -> &Tensor {
        &self.0.tensor
    }

    /// The gradient, if there is one: where a strategy has put it, or the leaf's own.
    pub fn gradient(&self) -> Result<Option<Tensor>> {
        if let Some(gradient) = self.0.gradient.borrow().as_ref() {
            return Ok(Some(gradient.shallow_clone()));
        }
        let gradient = self.tensor().f_grad()?;
        Ok(gradient.defined().then_some(gradient))
    }

    /// Says where the gradient is that a strategy has reduced; `None` when there is none any more.
    pub fn set_gradient(&self, gradient: Option<Tensor>) {
        self.0.gradient.replace(gradient);
    }

    /// The ranks that hold the same parameter but compute with it on a part of the input each: their
    /// gradients are the terms of its gradient. Strategies add them up, once a step.
    pub fn gradient_terms(&self) -> Option<&Group> {
        self.0.terms.as_ref()
    }

    /// The kind of the master copy.
    pub fn kind(&self) -> Kind {
        self.0.tensor.kind()
    }

    /// The kind layers compute in.
    pub fn compute_kind(&self) -> Kind {
        self.0.compute_kind
    }

    /// Whether gradients are wanted; a buffer wants none.
    pub fn is_trainable(&self) -> bool {
        self.0.tensor.requires_grad()
    }

    /// What layers compute with: the master copy, cast to the compute kind within autograd.
    pub fn value(&self) -> Result<Tensor> {
        self.as_computed(self.tensor())
    }

    /// `tensor`, which was read from the master copy, in the compute kind.
    pub(crate) fn as_computed(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(if self.kind() == self.compute_kind() {
            tensor.shallow_clone()
        } else {
            tensor.f_to_kind(self.compute_kind())?
        })
    }

    /// Whether both are the same parameter, not only equal ones.
    pub fn is(&self, other: &Parameter) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {:?} {:?} ({})",
            self.name(),
            self.shape(),
            self.kind(),
            self.layout()
        )
    }
}

/// The lengths of a tensor's dimensions, which are never negative.
pub(crate) fn shape_of(tensor: &Tensor) -> Vec<usize> {
    let lengths = tensor.size().into_iter();
    lengths.map(|length| length as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, Init};
    use trainyard_mesh::{Axis, Placement};

    #[test]
    fn value_is_cast_within_autograd_when_kinds_differ() -> Result<()> {
        let builder = Builder::new(3).compute_kind(Kind::BFloat16);
        let weight = builder.parameter("w", &[4], Init::Uniform { bound: 1.0 })?;
        assert_eq!(weight.kind(), Kind::Float);
        let value = weight.value()?;
        assert_eq!(value.kind(), Kind::BFloat16);
        value.sum(Kind::Float).backward();
        let gradient = weight.tensor().grad();
        assert_eq!(gradient.kind(), Kind::Float);
        assert_eq!(Vec::<f32>::try_from(gradient)?, [1.0; 4]);
        Ok(())
    }

    #[test]
    fn clones_share_layout_and_identity() -> Result<()> {
        let weight = Builder::new(3).parameter("w", &[4, 2], Init::Ones)?;
        let clone = weight.clone();
        clone.set_layout(Layout::replicated().with(Axis::DpShard, Placement::Flat));
        assert_eq!(weight.layout().get(Axis::DpShard), Placement::Flat);
        assert!(weight.is(&clone));
        assert!(!weight.is(&Builder::new(3).parameter("w", &[4, 2], Init::Ones)?));
        assert_eq!(weight.num_elements(), 8);
        assert!(weight.is_trainable());
        Ok(())
    }
}

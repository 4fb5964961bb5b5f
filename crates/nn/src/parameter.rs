//! A parameter: a tensor of the model with the same global name and shape on every rank.
//!
//! The layout determines which shard a rank holds. Optimizers update [`Parameter::tensor`], the master weights;
//! layers compute with [`Parameter::value`], which may have a smaller dtype.

use std::{
    cell::{Cell, RefCell},
    fmt,
    ops::Range,
    rc::Rc,
};

use tch::{Kind, Tensor};
use trainyard_mesh::Layout;
use trainyard_torch::{Group, memory, storage};
use trainyard_trace::MemoryKind;

use crate::Result;
use crate::bucket_view::BucketView;
use crate::initial_values::InitialValues;

/// A named, trainable tensor. Clones share it.
#[derive(Clone)]
pub struct Parameter(Rc<Inner>);

struct Inner {
    name: String,
    shape: Vec<usize>,
    layout: Cell<Layout>,
    tensor: Tensor,
    /// The initial values, as long as the tensor has no memory.
    deferred: RefCell<Option<Rc<dyn InitialValues>>>,
    /// The gradient that a strategy has set, if not the leaf's own.
    gradient: RefCell<Option<Tensor>>,
    /// What backward of a cast may write the leaf's own gradient into, if a strategy has buckets.
    bucket_view: RefCell<Option<BucketView>>,
    compute_kind: Kind,
    partial_grad_group: Option<Group>,
    is_running_stat: Cell<bool>,
}

/// The properties of a parameter besides its tensor.
pub(crate) struct ParameterSpec {
    pub name: String,
    /// The global shape.
    pub shape: Vec<usize>,
    pub layout: Layout,
    pub compute_kind: Kind,
    pub partial_grad_group: Option<Group>,
}

impl Parameter {
    /// A replicated parameter from an existing leaf tensor, whose shape is the global one.
    pub fn from_tensor(name: impl Into<String>, tensor: Tensor) -> Result<Parameter> {
        let kind = tensor.f_kind()?;
        Parameter::with_compute_kind(kind, name, tensor)
    }

    /// The same, cast to `compute_kind` whenever a layer reads it.
    pub fn with_compute_kind(
        compute_kind: Kind,
        name: impl Into<String>,
        tensor: Tensor,
    ) -> Result<Parameter> {
        let spec = ParameterSpec {
            name: name.into(),
            shape: shape_of(&tensor),
            layout: Layout::replicated(),
            compute_kind,
            partial_grad_group: None,
        };
        Ok(Parameter::from_spec(spec, tensor))
    }

    /// A parameter from this rank's shard.
    pub(crate) fn from_spec(spec: ParameterSpec, tensor: Tensor) -> Parameter {
        Parameter(Rc::new(Inner {
            name: spec.name,
            shape: spec.shape,
            layout: Cell::new(spec.layout),
            tensor,
            deferred: RefCell::default(),
            gradient: RefCell::default(),
            bucket_view: RefCell::default(),
            compute_kind: spec.compute_kind,
            partial_grad_group: spec.partial_grad_group,
            is_running_stat: Cell::default(),
        }))
    }

    /// This rank's shard of the parameter, with the same name: `tensor` is the shard that `layout` describes.
    /// Optimizers update the shard, while layers compute with the original.
    pub fn shard(&self, tensor: Tensor, layout: Layout) -> Result<Parameter> {
        let spec = ParameterSpec {
            name: self.0.name.clone(),
            shape: self.0.shape.clone(),
            layout,
            compute_kind: tensor.f_kind()?,
            partial_grad_group: self.0.partial_grad_group.clone(),
        };
        Ok(Parameter::from_spec(spec, tensor))
    }

    /// The global name, as in Hugging Face models: `model.layers.0.mlp.up_proj.weight`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The global shape, regardless of this rank's shard.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// The number of elements of the global shape.
    pub fn num_elements(&self) -> u64 {
        self.0.shape.iter().map(|&length| length as u64).product()
    }

    /// The layout of the parameter over the device mesh.
    pub fn layout(&self) -> Layout {
        self.0.layout.get()
    }

    /// Sets the layout after a strategy has sharded the parameter.
    pub fn set_layout(&self, layout: Layout) {
        self.0.layout.set(layout);
    }

    /// The leaf tensor, in which autograd accumulates gradients and which optimizers update.
    pub fn tensor(&self) -> &Tensor {
        &self.0.tensor
    }

    /// Remembers the initial values instead of computing them, since the tensor has no memory.
    pub(crate) fn defer(&self, values: impl InitialValues + 'static) {
        self.0.deferred.replace(Some(Rc::new(values)));
    }

    /// Sets the initial values: at once, or if the parameter is deferred, when it gets memory.
    pub(crate) fn initialize(&self, values: impl InitialValues + 'static) -> Result<()> {
        if self.0.deferred.borrow().is_some() {
            self.defer(values);
            return Ok(());
        }
        let flat = self.tensor().f_detach()?.f_view(-1i64)?;
        values.write(0..flat.numel(), &flat)
    }

    /// Writes these elements of this rank's shard, counted in row-major order, to a flat tensor. If the parameter is
    /// deferred, only they are computed.
    pub fn copy_elements(&self, elements: Range<usize>, target: &Tensor) -> Result<()> {
        if let Some(values) = self.0.deferred.borrow().as_ref() {
            return values.write(elements, target);
        }
        let (start, length) = (elements.start as i64, elements.len() as i64);
        tch::no_grad(|| -> Result<()> {
            let flat = self.tensor().f_view(-1i64)?;
            let mut target = target.shallow_clone();
            Ok(target.f_copy_(&flat.f_narrow(0, start, length)?)?)
        })
    }

    /// Gives a deferred parameter its memory and its initial values; others stay as they are.
    pub fn materialize(&self) -> Result<()> {
        let Some(values) = self.0.deferred.take() else {
            return Ok(());
        };
        memory::scope(MemoryKind::Parameter, || storage::restore(self.tensor()))?;
        let flat = self.tensor().f_detach()?.f_view(-1i64)?;
        values.write(0..flat.numel(), &flat)
    }

    /// Makes the tensor use the memory of `data`, which a strategy has allocated and filled.
    pub fn rebind(&self, data: &Tensor) -> Result<()> {
        self.0.deferred.take();
        Ok(storage::rebind(self.tensor(), data)?)
    }

    /// The gradient, if there is one: the one that a strategy has set, or the leaf's own.
    pub fn gradient(&self) -> Result<Option<Tensor>> {
        if let Some(gradient) = self.0.gradient.borrow().as_ref() {
            return Ok(Some(gradient.shallow_clone()));
        }
        let gradient = self.tensor().f_grad()?;
        Ok(gradient.defined().then_some(gradient))
    }

    /// Sets the gradient that a strategy has reduced; `None` removes it.
    pub fn set_gradient(&self, gradient: Option<Tensor>) {
        self.0.gradient.replace(gradient);
    }

    /// The view of a bucket that backward of a cast may write the leaf's own gradient into.
    pub fn bucket_view(&self) -> BucketView {
        let mut view = self.0.bucket_view.borrow_mut();
        view.get_or_insert_default().clone()
    }

    /// The ranks that hold the same parameter and each compute a partial gradient, from a part of the input.
    /// Strategies all-reduce the partial gradients once a step.
    pub fn partial_grad_group(&self) -> Option<&Group> {
        self.0.partial_grad_group.as_ref()
    }

    /// The dtype of the master weights.
    pub fn kind(&self) -> Kind {
        self.0.tensor.kind()
    }

    /// The dtype that layers compute in.
    pub fn compute_kind(&self) -> Kind {
        self.0.compute_kind
    }

    /// Whether the parameter requires a gradient; a buffer does not.
    pub fn is_trainable(&self) -> bool {
        self.0.tensor.requires_grad()
    }

    /// Whether it is a buffer that forward updates from its batch, such as the running mean of BatchNorm.
    pub fn is_running_stat(&self) -> bool {
        self.0.is_running_stat.get()
    }

    /// The same buffer as one that forward updates from its batch.
    #[must_use]
    pub fn into_running_stat(self) -> Parameter {
        self.0.is_running_stat.set(true);
        self
    }

    /// The value that layers compute with: the master weights, cast to the compute dtype within autograd.
    pub fn value(&self) -> Result<Tensor> {
        match self.0.bucket_view.borrow().as_ref() {
            Some(view) if self.kind() != self.compute_kind() => {
                Ok(view.cast(self.tensor(), self.compute_kind())?)
            }
            _ => self.to_compute_kind(self.tensor()),
        }
    }

    /// Casts `tensor`, which was read from the master weights, to the compute dtype.
    pub(crate) fn to_compute_kind(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(if self.kind() == self.compute_kind() {
            tensor.shallow_clone()
        } else {
            tensor.f_to_kind(self.compute_kind())?
        })
    }

    /// Whether both are the same parameter, not merely equal.
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

/// The shape of a tensor as unsigned numbers.
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
    fn value_is_cast_within_autograd_if_dtypes_differ() -> Result<()> {
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

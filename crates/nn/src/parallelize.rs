//! Tensor parallelism of any model of units, as PyTorch's `parallelize_module`.
//!
//! ```no_run
//! use trainyard_nn::ParallelStyle::{Colwise, Rowwise};
//! # use trainyard_nn::{Builder, SimpleCnn, parallelize};
//! # fn wrap(tp: &trainyard_torch::Group) -> trainyard_nn::Result<()> {
//! let model = SimpleCnn::build(&Builder::new(1))?;
//! let model = parallelize(model, tp, [("fc1", Colwise), ("fc2", Rowwise)])?;
//! # Ok(())
//! # }
//! ```
//!
//! Every rank of the group has the same batch. A unit with a style keeps its shard of one weight, a matrix or a convolution;
//! all other units are replicated, and each rank computes them alike.

use std::rc::Rc;

use tch::Tensor;
use trainyard_mesh::{Axis, Dim, Layout, Placement};
use trainyard_torch::{Group, TorchError, autograd, memory, meta};
use trainyard_trace::{MemoryKind, Purpose};

use crate::tensor_parallel::collectives::{all_reduce, all_reduce_gradient};
use crate::{
    Context, Model, Module, NnError, Parameter, Result, Router, SequenceParallel, TensorParallel,
    Unit,
};

/// How the weight of a unit is sharded.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ParallelStyle {
    /// By outputs: a rank computes some features. What follows the product in the unit must treat features alike, as
    /// ReLU does.
    Colwise,
    /// By outputs, and the features of all ranks are gathered at the end of the unit.
    ColwiseGathered,
    /// By inputs, which are the features of a colwise unit before: each rank computes a partial sum. The product must be the
    /// last operation of the unit.
    Rowwise,
}

impl ParallelStyle {
    /// The same, with the features of all ranks gathered at the end of the unit, for a next unit that is not rowwise.
    #[must_use]
    pub fn gather_output(self) -> ParallelStyle {
        match self {
            ParallelStyle::Colwise => ParallelStyle::ColwiseGathered,
            gathered => gathered,
        }
    }

    /// The dim of a parameter that is sharded; none if it is replicated.
    fn sharded_dim(self, num_dims: usize) -> Option<Dim> {
        match (self, num_dims) {
            (ParallelStyle::Colwise | ParallelStyle::ColwiseGathered, _) => Some(Dim(0)),
            (ParallelStyle::Rowwise, 0 | 1) => None,
            (ParallelStyle::Rowwise, _) => Some(Dim(1)),
        }
    }
}

/// A model with some units sharded over tensor-parallel ranks.
pub struct Parallelized<M> {
    model: Rc<M>,
    units: Vec<ParallelUnit<M>>,
}

/// A unit of the model, with the communication around it.
struct ParallelUnit<M> {
    model: Rc<M>,
    index: usize,
    name: String,
    /// None for a replicated unit.
    sharded: Option<Sharded>,
}

struct Sharded {
    style: ParallelStyle,
    group: Group,
    /// The dim of the output that has the features.
    feature_dim: i64,
    bias: Option<Parameter>,
}

/// Shards units of `model` by name over the ranks of `group`. All ranks must pass the same weights; wrap the result in a
/// data-parallel strategy afterwards.
pub fn parallelize<M: Model, N: Into<String>>(
    model: M,
    group: &Group,
    plan: impl IntoIterator<Item = (N, ParallelStyle)>,
) -> Result<Parallelized<M>> {
    let model = Rc::new(model);
    let units: Vec<String> = model.units().iter().map(|u| u.name().to_owned()).collect();
    let mut styles = vec![None; units.len()];
    for (name, style) in plan {
        let name = name.into();
        let Some(index) = units.iter().position(|unit| *unit == name) else {
            return Err(NnError::UnknownUnit { name, units });
        };
        styles[index] = Some(style);
    }
    let units = units.into_iter().zip(styles).enumerate();
    let units = units.map(|(index, (name, style))| {
        let unit = model.units()[index];
        let style = style.filter(|_| group.size() > 1);
        let sharded = style
            .map(|style| Sharded::of(unit, style, group))
            .transpose()?;
        Ok(ParallelUnit {
            model: Rc::clone(&model),
            index,
            name,
            sharded,
        })
    });
    Ok(Parallelized {
        units: units.collect::<Result<_>>()?,
        model,
    })
}

impl Sharded {
    /// Keeps this rank's shard of every parameter of the unit.
    fn of(unit: &dyn Unit, style: ParallelStyle, group: &Group) -> Result<Sharded> {
        let parameters = unit.parameters();
        let (weights, biases): (Vec<_>, Vec<_>) =
            parameters.iter().partition(|p| p.shape().len() > 1);
        let ([weight], [] | [_]) = (&weights[..], &biases[..]) else {
            return Err(NnError::NotOneWeight {
                unit: unit.name().to_owned(),
                num_weights: weights.len(),
            });
        };
        for parameter in &parameters {
            if let Some(dim) = style.sharded_dim(parameter.shape().len()) {
                keep_shard(parameter, dim, group)?;
            }
        }
        Ok(Sharded {
            style,
            group: group.clone(),
            feature_dim: if weight.shape().len() > 2 { 1 } else { -1 },
            bias: biases.first().map(|&bias| bias.clone()),
        })
    }

    fn forward(
        &self,
        x: &Tensor,
        forward: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        match self.style {
            ParallelStyle::Colwise => forward(&all_reduce_gradient(&self.group, x)?),
            ParallelStyle::ColwiseGathered => {
                let features = forward(&all_reduce_gradient(&self.group, x)?)?;
                gather_features(&self.group, &features, self.feature_dim)
            }
            ParallelStyle::Rowwise => self.with_bias_once(&all_reduce(&self.group, &forward(x)?)?),
        }
    }

    /// Every rank added the bias to its partial sum; all but one are removed. Backward passes the gradient of the sum to
    /// each rank's bias, which is what one bias gets.
    fn with_bias_once(&self, sum: &Tensor) -> Result<Tensor> {
        let Some(bias) = &self.bias else {
            return Ok(sum.shallow_clone());
        };
        let num_surplus = self.group.size() as f64 - 1.0;
        let mut shape = vec![1; sum.dim()];
        let feature_dim = self.feature_dim.rem_euclid(sum.dim() as i64);
        shape[feature_dim as usize] = -1;
        let surplus = bias.value()?.f_detach()?.f_view(&shape[..])?;
        Ok(sum.f_sub(&surplus.f_mul_scalar(num_surplus)?)?)
    }
}

/// Replaces a full parameter by this rank's shard of it.
fn keep_shard(parameter: &Parameter, dim: Dim, group: &Group) -> Result<()> {
    let tp = TensorParallel::new(group, SequenceParallel::Disabled);
    let own = tp.shard_range(parameter.name(), parameter.shape()[dim.0])?;
    parameter.materialize()?;
    let full = parameter.tensor().f_detach()?;
    let shard = full.f_narrow(dim.0 as i64, own.start as i64, own.len() as i64)?;
    // A copy, so that the full tensor is released.
    let shard = memory::scope(MemoryKind::Parameter, || {
        shard.f_contiguous()?.f_detach_copy()
    })?;
    parameter.rebind(&shard)?;
    parameter.set_layout(Layout::replicated().with(Axis::Tp, Placement::Shard(dim)));
    Ok(())
}

/// The features of all ranks. Every rank computes the same from them, so a rank's gradient is its part of that of any rank.
fn gather_features(group: &Group, own: &Tensor, dim: i64) -> Result<Tensor> {
    let (index, num_own) = (
        group.index() as i64,
        own.size()[dim.rem_euclid(own.dim() as i64) as usize],
    );
    let gather = |own: &Tensor| -> Result<Tensor, TorchError> {
        let own = own.f_contiguous()?;
        let shape = [vec![group.size() as i64], own.size()].concat();
        let all = meta::new_empty(&own, &shape)?;
        group.all_gather(&all, &own, Purpose::Activation)?.wait()?;
        Ok(Tensor::f_cat(&all.f_unbind(0)?, dim)?)
    };
    Ok(autograd::apply(
        &[own],
        |_, inputs| gather(inputs[0]),
        move |_, gradients| {
            let own = |gradient: &Tensor| gradient.f_narrow(dim, index * num_own, num_own);
            Ok(vec![gradients[0].as_ref().map(own).transpose()?])
        },
    )?)
}

impl<M: Model> Module for Parallelized<M> {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        self.model.visit(visitor);
    }
}

impl<M: Model> Model for Parallelized<M> {
    fn units(&self) -> Vec<&dyn Unit> {
        self.units.iter().map(|unit| unit as &dyn Unit).collect()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        self.model.loss(output, targets)
    }

    fn layer_comm_bytes(&self, num_tokens: u64) -> Option<u64> {
        let is_sharded = self.units.iter().any(|unit| unit.sharded.is_some());
        self.model
            .layer_comm_bytes(num_tokens)
            .filter(|_| !is_sharded)
    }
}

impl<M: Model> ParallelUnit<M> {
    fn unit(&self) -> &dyn Unit {
        self.model.units()[self.index]
    }
}

impl<M: Model> Module for ParallelUnit<M> {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        self.unit().visit(visitor);
    }
}

impl<M: Model> Unit for ParallelUnit<M> {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        match &self.sharded {
            None => self.unit().forward(x, cx),
            Some(sharded) => sharded.forward(x, |x| self.unit().forward(x, cx)),
        }
    }

    fn type_name(&self) -> &'static str {
        self.unit().type_name()
    }

    fn tied_parameters(&self) -> Vec<Parameter> {
        self.unit().tied_parameters()
    }

    fn lookup_tables(&self) -> Vec<Parameter> {
        self.unit().lookup_tables()
    }

    fn router(&self) -> Option<&Router> {
        self.unit().router()
    }
}

//! Gradient clipping by the global norm.
//!
//! The operations and their order are those of `torch.nn.utils.clip_grad_norm_`, so that training on one
//! rank is bitwise equal to PyTorch. (Scaling inside the optimizer kernel would save a pass over the
//! gradients, but not be bitwise equal.)
//!
//! Squared norms are summed over the mesh axes that shard a parameter and over no others, so that every
//! element counts once.

use tch::{Kind, Tensor};
use trainyard_mesh::Axis;
use trainyard_nn::{Parameter, parameters_by_axes};
use trainyard_torch::{Group, ReduceOp, World, kernel, scalar};
use trainyard_trace::Purpose;

use crate::{Result, TrainError};

/// Avoids division by zero, as in PyTorch.
const EPS: f64 = 1e-6;

/// Parameters sharded over the same axes, and the group of ranks that hold their other shards.
struct ShardGroup {
    parameters: Vec<Parameter>,
    group: Group,
}

/// Computes the global gradient norm; parameters are grouped by the axes that shard them.
pub struct GradNorm {
    shard_groups: Vec<ShardGroup>,
    /// The pipeline stages, each of which has parameters of its own.
    stages: Group,
}

impl GradNorm {
    /// Groups these parameters, whose layouts must be final.
    pub fn new(parameters: &[Parameter], world: &World) -> Result<GradNorm> {
        let by_axes = parameters_by_axes(parameters, |p| p.layout().sharded_axes());
        let shard_groups = by_axes.into_iter().map(|(axes, parameters)| {
            let group = world.group(axes)?;
            Ok(ShardGroup { parameters, group })
        });
        Ok(GradNorm {
            shard_groups: shard_groups.collect::<Result<_>>()?,
            stages: world.group(Axis::Pp)?,
        })
    }

    /// The 2-norm of the global gradient, as a scalar tensor on the device. This is a collective call.
    pub fn norm(&self) -> Result<Tensor> {
        let norms = self.shard_groups.iter().map(ShardGroup::norm);
        let norms = norms.collect::<Result<Vec<_>>>()?;
        let own = match &norms[..] {
            [norm] => norm.shallow_clone(),
            [] => return Err(TrainError::NoParameters),
            _ => tch::no_grad(|| stacked(&norms)?.f_norm().map_err(TrainError::from))?,
        };
        reduce_norm(&self.stages, own)
    }
}

/// The norm over all shards of a group, from the norm of this rank's shard.
fn reduce_norm(group: &Group, own: Tensor) -> Result<Tensor> {
    if group.size() == 1 {
        return Ok(own);
    }
    tch::no_grad(|| {
        let square = own.f_square()?.f_view(1)?;
        group
            .on_caller()
            .all_reduce(&square, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        Ok(square.f_sqrt()?.f_squeeze()?)
    })
}

impl ShardGroup {
    fn norm(&self) -> Result<Tensor> {
        reduce_norm(&self.group, grad_norm(&self.parameters)?)
    }
}

/// The 2-norm of the gradients of this rank, as a scalar tensor on the device.
pub fn grad_norm(parameters: &[Parameter]) -> Result<Tensor> {
    tch::no_grad(|| {
        let gradients = gradients(parameters)?;
        if gradients.is_empty() {
            let first = parameters.first().ok_or(TrainError::NoParameters)?;
            return Ok(scalar::zero_like(first.tensor())?.f_to_kind(wide(first.kind()))?);
        }
        Ok(stacked(&kernel::foreach_norm(&gradients)?)?.f_norm()?)
    })
}

/// Scales all gradients so that their global norm, given as `norm`, is at most `max_norm`.
pub fn clip(parameters: &[Parameter], norm: &Tensor, max_norm: f64) -> Result<()> {
    let gradients = gradients(parameters)?;
    if gradients.is_empty() {
        return Ok(());
    }
    let coefficient = clip_coefficient(norm, max_norm)?;
    Ok(tch::no_grad(|| {
        kernel::foreach_mul_tensor_(&gradients, &coefficient)
    })?)
}

/// The factor for the gradients: at most 1.
fn clip_coefficient(norm: &Tensor, max_norm: f64) -> Result<Tensor> {
    let coefficient = norm
        .f_add_scalar(EPS)?
        .f_reciprocal()?
        .f_mul_scalar(max_norm)?;
    Ok(coefficient.f_clamp_max(1.0)?)
}

/// The gradients of all parameters that have one.
fn gradients(parameters: &[Parameter]) -> Result<Vec<Tensor>> {
    let mut gradients = Vec::with_capacity(parameters.len());
    for parameter in parameters {
        gradients.extend(parameter.gradient()?);
    }
    Ok(gradients)
}

/// Scalars as one vector, in the widest of their dtypes.
fn stacked(scalars: &[Tensor]) -> Result<Tensor> {
    let double = scalars.iter().any(|scalar| scalar.kind() == Kind::Double);
    let kind = if double { Kind::Double } else { Kind::Float };
    let widened = scalars.iter().map(|scalar| scalar.f_to_kind(kind));
    Ok(Tensor::f_stack(
        &widened.collect::<Result<Vec<_>, _>>()?,
        0,
    )?)
}

/// The dtype in which norms of gradients of dtype `kind` are accumulated.
fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use trainyard_torch::meta;

    use super::*;

    fn parameter(gradient: Option<&[f64]>, kind: Kind) -> Parameter {
        let length = gradient.map_or(1, <[f64]>::len) as i64;
        let leaf = Tensor::zeros(length, (kind, tch::Device::Cpu)).set_requires_grad(true);
        if let Some(gradient) = gradient {
            let gradient = Tensor::from_slice(gradient).to_kind(kind);
            (&leaf * gradient).sum(kind).backward();
        }
        Parameter::from_tensor("p", leaf).unwrap()
    }

    #[test]
    fn the_norm_of_mixed_dtypes_has_the_widest_dtype() {
        let gradient: &[f64] = &[3.0];
        let single = parameter(Some(gradient), Kind::Float);
        let narrow = parameter(Some(gradient), Kind::BFloat16);
        let double = parameter(Some(&[4.0]), Kind::Double);
        let kind = |parameters: &[&Parameter]| {
            let parameters: Vec<_> = parameters.iter().map(|&p| p.clone()).collect();
            let norm = grad_norm(&parameters).unwrap();
            (norm.kind(), norm.double_value(&[]))
        };
        assert_eq!(kind(&[&single, &double]), (Kind::Double, 5.0));
        assert_eq!(kind(&[&narrow]), (Kind::Float, 3.0));
    }

    #[test]
    fn the_norm_without_gradients_is_zero() {
        let norm = grad_norm(&[parameter(None, Kind::Double)]).unwrap();
        assert_eq!((norm.kind(), norm.double_value(&[])), (Kind::Double, 0.0));
        assert!(matches!(grad_norm(&[]), Err(TrainError::NoParameters)));
    }

    #[test]
    fn nan_is_propagated() {
        let coefficient = clip_coefficient(&Tensor::from(f64::NAN), 1.0).unwrap();
        assert!(coefficient.double_value(&[]).is_nan());
    }

    #[test]
    fn runs_on_the_meta_device() {
        let leaf = meta::empty(&[1 << 20, 1 << 20], Kind::Float).unwrap();
        let leaf = leaf.set_requires_grad(true);
        (&leaf * 2.0).sum(Kind::Float).backward();
        let parameters = [Parameter::from_tensor("p", leaf).unwrap()];
        let norm = grad_norm(&parameters).unwrap();
        clip(&parameters, &norm, 1.0).unwrap();
        assert!(meta::is_meta(&norm) && norm.size().is_empty());
    }

    proptest! {
        #[test]
        fn clipping_enforces_max_norm_and_keeps_smaller_gradients(
            gradients in proptest::collection::vec(
                proptest::option::of(proptest::collection::vec(-9.0f64..9.0, 1..6)), 1..5),
            max_norm in 0.1f64..20.0,
        ) {
            let parameters: Vec<_> = gradients
                .iter()
                .map(|gradient| parameter(gradient.as_deref(), Kind::Double))
                .collect();
            let expected = gradients.iter().flatten().flatten().map(|g| g * g).sum::<f64>().sqrt();
            let norm = grad_norm(&parameters).unwrap();
            clip(&parameters, &norm, max_norm).unwrap();
            let clipped = grad_norm(&parameters).unwrap().double_value(&[]);
            let norm = norm.double_value(&[]);
            prop_assert!((norm - expected).abs() <= 1e-12 * expected.max(1.0));
            prop_assert!(clipped <= max_norm);
            prop_assert!(norm + EPS > max_norm || clipped == norm);
        }
    }
}

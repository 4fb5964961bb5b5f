//! RMSNorm.
//!
//! On CPU libtorch has no fused kernel for RMSNorm: it composes eight operators and saves three tensors for backward.
//! The backward here saves the input and one number per row, and passes over memory about half as often. On CUDA
//! libtorch's kernel is used.

use tch::Tensor;
use trainyard_arch::{DecoderConfig, Norm};
use trainyard_torch::{TorchError, autograd, kernel};

use crate::loss::wide;
use crate::{Builder, Init, Module, Parameter, Result};

/// RMSNorm over the last dim, with a learned scale.
#[derive(Module, Debug)]
pub struct RmsNorm {
    weight: Parameter,
    eps: f64,
    /// Whether the scale is one more than the weight, as in Gemma.
    is_plus_one: bool,
}

impl RmsNorm {
    /// A norm over vectors of `width`, with an initial scale of 1.
    pub fn build(builder: &Builder, width: usize, eps: f64) -> Result<RmsNorm> {
        let weight = builder.positionwise("weight", &[width], Init::Ones)?;
        Ok(RmsNorm::from_weight(weight, eps))
    }

    /// The norm of a decoder's residual stream.
    pub fn of(config: &DecoderConfig, builder: &Builder, width: usize) -> Result<RmsNorm> {
        let is_plus_one = config.norm == Norm::RootMeanSquarePlusOne;
        let init = if is_plus_one { Init::Zeros } else { Init::Ones };
        let weight = builder.positionwise("weight", &[width], init)?;
        Ok(RmsNorm {
            is_plus_one,
            ..RmsNorm::from_weight(weight, config.norm_eps)
        })
    }

    /// A norm of vectors that differ between tensor-parallel ranks, as for attention heads; the scale has partial
    /// gradients.
    pub fn replicated(builder: &Builder, width: usize, norm: Norm, eps: f64) -> Result<RmsNorm> {
        let is_plus_one = norm == Norm::RootMeanSquarePlusOne;
        let init = if is_plus_one { Init::Zeros } else { Init::Ones };
        let weight = builder.replicated("weight", &[width], init)?;
        Ok(RmsNorm {
            is_plus_one,
            ..RmsNorm::from_weight(weight, eps)
        })
    }

    fn from_weight(weight: Parameter, eps: f64) -> RmsNorm {
        RmsNorm {
            weight,
            eps,
            is_plus_one: false,
        }
    }

    /// The normalized `x`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut weight = self.weight.value()?;
        if self.is_plus_one {
            weight = widened(&weight)?.f_add_scalar(1.0)?;
        }
        if x.device().is_cuda() {
            return Ok(kernel::rms_norm(x, &weight.f_to_kind(x.kind())?, self.eps)?);
        }
        rms_norm(x, &weight, self.eps)
    }
}

/// `y = x * rstd * weight` with `rstd = 1 / sqrt(mean(x^2) + eps)` of each row.
fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Ok(autograd::apply(
        &[x, weight],
        |saver, inputs| {
            let (x, weight) = (inputs[0], inputs[1]);
            let wide = widened(x)?;
            let width = x.size().last().copied().unwrap_or(1) as f64;
            let norm = wide.f_norm_scalaropt_dim(2, [-1i64], true)?;
            let rstd = norm
                .f_square()?
                .f_div_scalar(width)?
                .f_add_scalar(eps)?
                .f_rsqrt()?;
            saver.save(x);
            saver.save(weight);
            saver.save(&rstd);
            let mut y = wide.f_mul(&rstd)?;
            Ok(y.f_mul_(&widened(weight)?)?.f_to_kind(x.kind())?)
        },
        |saved, gradients| match (saved, gradients) {
            ([x, weight, rstd], [Some(gradient)]) => backward(x, weight, rstd, gradient),
            _ => Ok(vec![None, None]),
        },
    )?)
}

/// With `t = dy * x`: `dweight = t^T rstd` and, with `s = t weight` one number per row,
/// `dx = rstd * dy * weight - x * (rstd^3 * s / width)`.
fn backward(
    x: &Tensor,
    weight: &Tensor,
    rstd: &Tensor,
    gradient: &Tensor,
) -> Result<Vec<Option<Tensor>>, TorchError> {
    let width = x.size().last().copied().unwrap_or(1);
    let rows =
        |t: &Tensor| -> Result<Tensor, TorchError> { Ok(widened(t)?.f_reshape([-1, width])?) };
    let (x_rows, dy, rstd) = (rows(x)?, rows(gradient)?, rstd.f_reshape([-1, 1])?);
    let wide_weight = widened(weight)?;
    let t = dy.f_mul(&x_rows)?;
    let d_weight = t.f_transpose(0, 1)?.f_mv(&rstd.f_squeeze_dim(1)?)?;
    let along_row = t.f_mv(&wide_weight)?.f_unsqueeze(1)?;
    let factor = rstd
        .f_pow_tensor_scalar(3)?
        .f_mul(&along_row)?
        .f_div_scalar(-width)?;
    let mut d_x = dy.f_mul(&wide_weight)?;
    let d_x = d_x.f_mul_(&rstd)?.f_addcmul_(&x_rows, &factor)?;
    Ok(vec![
        Some(d_x.f_to_kind(x.kind())?.f_view_as(x)?),
        Some(d_weight.f_to_kind(weight.kind())?),
    ])
}

/// Casts to at least fp32, which sums of squares need.
fn widened(tensor: &Tensor) -> Result<Tensor, TorchError> {
    Ok(tensor.f_to_kind(wide(tensor.kind()))?)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn equals_libtorch_forward_and_backward() -> Result<()> {
        let options = (Kind::Double, Device::Cpu);
        let x = Tensor::randn([2, 5, 8], options).set_requires_grad(true);
        let weight = Tensor::randn([8], options).set_requires_grad(true);
        let direction = Tensor::randn([2, 5, 8], options);
        let gradients = |y: Tensor| {
            let loss = (y * &direction).sum(Kind::Double);
            Tensor::run_backward(&[loss], &[&x, &weight], false, false)
        };
        let (ours, theirs) = (
            rms_norm(&x, &weight, 1e-5)?,
            kernel::rms_norm(&x, &weight, 1e-5)?,
        );
        assert!(ours.allclose(&theirs, 1e-12, 1e-12, false));
        for (ours, theirs) in gradients(ours).iter().zip(&gradients(theirs)) {
            assert!(ours.allclose(theirs, 1e-12, 1e-12, false));
        }
        Ok(())
    }

    #[test]
    fn half_precision_is_accumulated_in_fp32() -> Result<()> {
        let x = Tensor::full([1, 4096], 3.0, (Kind::BFloat16, Device::Cpu));
        let weight = Tensor::ones([4096], (Kind::BFloat16, Device::Cpu));
        let y = rms_norm(&x, &weight, 1e-5)?;
        assert_eq!(y.kind(), Kind::BFloat16);
        assert_eq!(f64::try_from(y.max())?, 1.0);
        Ok(())
    }
}

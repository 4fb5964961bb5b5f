//! Rows brought to mean zero and deviation one.

use tch::Tensor;

use crate::loss::wide;
use crate::{Builder, Init, Module, Parameter, Result};

/// Norm over the last dimension by mean and deviation, with a learnt scale and bias.
#[derive(Module, Debug)]
pub struct LayerNorm {
    weight: Parameter,
    bias: Parameter,
    eps: f64,
}

impl LayerNorm {
    /// A norm over vectors of `width`, whose scale begins at one and whose bias at zero.
    pub fn build(builder: &Builder, width: usize, eps: f64) -> Result<LayerNorm> {
        Ok(LayerNorm {
            weight: builder.positionwise("weight", &[width], Init::Ones)?,
            bias: builder.positionwise("bias", &[width], Init::Zeros)?,
            eps,
        })
    }

    /// `x`, normed. In at least single precision: libtorch would add up the gradients of scale and bias
    /// in a half type, a row after the other.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let kind = wide(x.kind());
        let weight = self.weight.value()?.f_to_kind(kind)?;
        let bias = self.bias.value()?.f_to_kind(kind)?;
        let rows = x.f_to_kind(kind)?;
        let width = weight.size();
        let normed = rows.f_layer_norm(&width[..], Some(&weight), Some(&bias), self.eps, false)?;
        Ok(normed.f_to_kind(x.kind())?)
    }
}

//! LayerNorm.

use tch::Tensor;

use crate::loss::wide;
use crate::{Builder, Init, Module, Parameter, Result};

/// LayerNorm over the last dim, with a learned scale and bias.
#[derive(Module, Debug)]
pub struct LayerNorm {
    weight: Parameter,
    bias: Parameter,
    eps: f64,
}

impl LayerNorm {
    /// A norm over vectors of `width`, with an initial scale of 1 and bias of 0.
    pub fn build(builder: &Builder, width: usize, eps: f64) -> Result<LayerNorm> {
        Ok(LayerNorm {
            weight: builder.positionwise("weight", &[width], Init::Ones)?,
            bias: builder.positionwise("bias", &[width], Init::Zeros)?,
            eps,
        })
    }

    /// The normalized `x`, computed in at least fp32: in half precision libtorch would accumulate the gradients of
    /// scale and bias in that type, row by row.
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

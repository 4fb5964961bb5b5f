//! Rows brought to mean zero and deviation one.

use tch::Tensor;

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

    /// `x`, normed.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = (self.weight.value()?, self.bias.value()?);
        let width = weight.size();
        Ok(x.f_layer_norm(&width[..], Some(&weight), Some(&bias), self.eps, false)?)
    }
}

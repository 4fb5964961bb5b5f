//! Division by the root of the mean square.

use tch::Tensor;
use trainyard_torch::kernel;

use crate::{Builder, Init, Module, Parameter, Result};

/// Root-mean-square norm over the last dimension, with a learnt scale.
#[derive(Module, Debug)]
pub struct RmsNorm {
    weight: Parameter,
    eps: f64,
}

impl RmsNorm {
    /// A norm over vectors of `width`, whose scale begins at one.
    pub fn build(builder: &Builder, width: usize, eps: f64) -> Result<RmsNorm> {
        Ok(RmsNorm {
            weight: builder.parameter("weight", &[width], Init::Ones)?,
            eps,
        })
    }

    /// `x`, scaled.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(kernel::rms_norm(x, &self.weight.value()?, self.eps)?)
    }
}

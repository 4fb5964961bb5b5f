//! The affine map.

use tch::Tensor;

use crate::{Builder, Init, Module, Parameter, Result};

/// `x · weightᵀ`, plus a bias if there is one.
#[derive(Module, Debug)]
pub struct Linear {
    weight: Parameter,
    bias: Option<Parameter>,
}

impl Linear {
    /// A map without bias; the weight is [out, in].
    pub fn build(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        init: Init,
    ) -> Result<Linear> {
        Ok(Linear {
            weight: builder.parameter("weight", &[num_outputs, num_inputs], init)?,
            bias: None,
        })
    }

    /// A map with a bias, chosen like the weight.
    pub fn with_bias(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        init: Init,
    ) -> Result<Linear> {
        Ok(Linear {
            bias: Some(builder.parameter("bias", &[num_outputs], init)?),
            ..Linear::build(builder, num_inputs, num_outputs, init)?
        })
    }

    /// A map that uses a weight another module owns: a tied head.
    pub fn tied(weight: Parameter) -> Linear {
        Linear { weight, bias: None }
    }

    /// The output for `x` [.., in].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let bias = self.bias.as_ref().map(Parameter::value).transpose()?;
        Ok(x.f_linear(&self.weight.value()?, bias.as_ref())?)
    }
}

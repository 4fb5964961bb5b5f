//! 2-D convolution.

use tch::Tensor;

use crate::{Builder, Init, Module, Parameter, Result};

/// A convolution with a square kernel and a bias that preserves the image size.
#[derive(Module, Debug)]
pub struct Conv2d {
    weight: Parameter,
    bias: Parameter,
    padding: i64,
}

impl Conv2d {
    /// From `num_inputs` channels to `num_outputs`, with a kernel of odd size `side`.
    pub fn build(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        side: usize,
    ) -> Result<Conv2d> {
        let shape = [num_outputs, num_inputs, side, side];
        let init = Init::fan_in(num_inputs * side * side);
        Ok(Conv2d {
            weight: builder.parameter("weight", &shape, init)?,
            bias: builder.parameter("bias", &[num_outputs], init)?,
            padding: (side / 2) as i64,
        })
    }

    /// The output for `x` [batch, channels, height, width], which is cast to the compute dtype.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let padding = [self.padding, self.padding];
        Ok(x.f_to_kind(self.weight.compute_kind())?.f_conv2d(
            &self.weight.value()?,
            Some(self.bias.value()?),
            [1, 1],
            padding,
            [1, 1],
            1,
        )?)
    }
}

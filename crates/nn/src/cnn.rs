//! A small convolutional network for MNIST.

use tch::Tensor;

use crate::{
    Builder, Context, Init, Model, Module, Result, Unit, cross_entropy_sum,
    layers::{Conv2d, Linear},
};

/// Two convolutions (1 to 32 to 64 channels, 3×3) and two dense layers (64·28·28 to 128 to 10).
#[derive(Module, Debug)]
pub struct SimpleCnn {
    conv1: Convolution,
    conv2: Convolution,
    fc1: Dense,
    fc2: Dense,
}

impl SimpleCnn {
    /// Builds the model.
    pub fn build(builder: &Builder) -> Result<SimpleCnn> {
        Ok(SimpleCnn {
            conv1: Convolution::build(&builder.push("conv1"), 1, 32)?,
            conv2: Convolution::build(&builder.push("conv2"), 32, 64)?,
            fc1: Dense::build(&builder.push("fc1"), 64 * 28 * 28, 128, true)?,
            fc2: Dense::build(&builder.push("fc2"), 128, 10, false)?,
        })
    }
}

impl Model for SimpleCnn {
    fn units(&self) -> Vec<&dyn Unit> {
        vec![&self.conv1, &self.conv2, &self.fc1, &self.fc2]
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        cross_entropy_sum(output, targets)
    }

    /// No layer communicates.
    fn layer_comm_bytes(&self, _num_tokens: u64) -> Option<u64> {
        Some(0)
    }
}

/// A convolution with ReLU.
#[derive(Module, Debug)]
struct Convolution {
    name: String,
    conv: Conv2d,
}

impl Convolution {
    fn build(builder: &Builder, num_inputs: usize, num_outputs: usize) -> Result<Convolution> {
        Ok(Convolution {
            name: builder.path().to_owned(),
            conv: Conv2d::build(builder, num_inputs, num_outputs, 3)?,
        })
    }
}

impl Unit for Convolution {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        Ok(self.conv.forward(x)?.f_relu()?)
    }
}

/// A dense layer over the flattened input, with ReLU except in the last layer.
#[derive(Module, Debug)]
struct Dense {
    name: String,
    linear: Linear,
    has_relu: bool,
}

impl Dense {
    fn build(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        has_relu: bool,
    ) -> Result<Dense> {
        let init = Init::fan_in(num_inputs);
        Ok(Dense {
            name: builder.path().to_owned(),
            linear: Linear::with_bias(builder, num_inputs, num_outputs, init)?,
            has_relu,
        })
    }
}

impl Unit for Dense {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        let output = self.linear.forward(&x.f_flatten(1, -1)?)?;
        Ok(if self.has_relu {
            output.f_relu()?
        } else {
            output
        })
    }
}

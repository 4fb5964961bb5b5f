//! Linear layers.

use std::ops::Range;

use tch::Tensor;
use trainyard_mesh::Dim;

use crate::{Builder, Init, Module, Parameter, Result, weight_gradients};

/// `x · weightᵀ`, plus an optional bias.
#[derive(Module, Debug)]
pub struct Linear {
    weight: Parameter,
    bias: Option<Parameter>,
    /// Whether the weight is [in, .., out], as in GPT-2, instead of [out, in].
    is_transposed: bool,
    /// The outputs that this rank computes of a replicated weight; all if `None`.
    #[module(skip)]
    outputs: Option<Range<usize>>,
}

impl Linear {
    /// A linear layer without bias; the weight is [out, in].
    pub fn build(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        init: Init,
    ) -> Result<Linear> {
        let weight = builder.parameter("weight", &[num_outputs, num_inputs], init)?;
        Ok(Linear::from_weight(weight))
    }

    /// A linear layer with a bias that is initialized like the weight.
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

    /// A colwise-parallel linear layer: every tensor-parallel rank has some outputs. For
    /// [`TensorParallel::colwise`](crate::TensorParallel::colwise).
    pub fn colwise(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        init: Init,
    ) -> Result<Linear> {
        let shape = [num_outputs, num_inputs];
        Ok(Linear::from_weight(builder.sharded(
            "weight",
            &shape,
            Dim(0),
            init,
        )?))
    }

    /// A rowwise-parallel linear layer: every tensor-parallel rank has some inputs. For
    /// [`TensorParallel::rowwise`](crate::TensorParallel::rowwise).
    pub fn rowwise(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        init: Init,
    ) -> Result<Linear> {
        let shape = [num_outputs, num_inputs];
        Ok(Linear::from_weight(builder.sharded(
            "weight",
            &shape,
            Dim(1),
            init,
        )?))
    }

    /// A linear layer of the activations between pairs, which every tensor-parallel rank has in full.
    pub fn positionwise(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        init: Init,
    ) -> Result<Linear> {
        let weight = builder.positionwise("weight", &[num_outputs, num_inputs], init)?;
        Ok(Linear::from_weight(weight))
    }

    /// A linear layer whose weight is replicated on tensor-parallel ranks; this rank computes `outputs`, which other
    /// ranks may compute too.
    pub fn replicated(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        outputs: Range<usize>,
        init: Init,
    ) -> Result<Linear> {
        Ok(Linear {
            outputs: Some(outputs),
            ..Linear::from_weight(builder.replicated("weight", &[num_outputs, num_inputs], init)?)
        })
    }

    /// `num_layers` colwise-parallel linear layers with the same input, in one transposed weight [in, layers, out]
    /// with a bias. Every tensor-parallel rank has some outputs of each.
    pub fn transposed_colwise(
        builder: &Builder,
        num_inputs: usize,
        num_layers: usize,
        num_outputs: usize,
        init: Init,
    ) -> Result<Linear> {
        let (mut shape, mut bias) = (vec![num_inputs], Vec::new());
        if num_layers > 1 {
            shape.push(num_layers);
            bias.push(num_layers);
        }
        shape.push(num_outputs);
        bias.push(num_outputs);
        let last = |shape: &[usize]| Dim(shape.len() - 1);
        Ok(Linear {
            bias: Some(builder.sharded("bias", &bias, last(&bias), Init::Zeros)?),
            is_transposed: true,
            ..Linear::from_weight(builder.sharded("weight", &shape, last(&shape), init)?)
        })
    }

    /// A rowwise-parallel linear layer with a transposed weight [in, out] and a bias that is added to the sum.
    pub fn transposed_rowwise(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        init: Init,
    ) -> Result<Linear> {
        let shape = [num_inputs, num_outputs];
        Ok(Linear {
            bias: Some(builder.positionwise("bias", &[num_outputs], Init::Zeros)?),
            is_transposed: true,
            ..Linear::from_weight(builder.sharded("weight", &shape, Dim(0), init)?)
        })
    }

    /// Adds a bias, initialized to zero and sharded or replicated like the weight.
    pub fn add_bias(self, builder: &Builder, num_outputs: usize) -> Result<Linear> {
        let shape = [num_outputs];
        let bias = match self.outputs {
            Some(_) => builder.replicated("bias", &shape, Init::Zeros)?,
            None => builder.sharded("bias", &shape, Dim(0), Init::Zeros)?,
        };
        Ok(Linear {
            bias: Some(bias),
            ..self
        })
    }

    /// A linear layer without bias from an existing weight, which may be tied.
    pub fn from_weight(weight: Parameter) -> Linear {
        Linear {
            weight,
            bias: None,
            is_transposed: false,
            outputs: None,
        }
    }

    /// The weight [out, in] of the outputs that this rank computes, in the compute dtype.
    pub(crate) fn value(&self) -> Result<Tensor> {
        let weight = self.weight.value()?;
        if self.is_transposed {
            Ok(weight.f_flatten(1, -1)?.f_transpose(0, 1)?)
        } else {
            self.own_outputs(weight)
        }
    }

    /// Whether it adds a bias.
    pub(crate) fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// The bias of those outputs.
    pub(crate) fn bias(&self) -> Result<Option<Tensor>> {
        let bias = self.bias.as_ref().map(Parameter::value).transpose()?;
        bias.map(|bias| self.own_outputs(bias.f_flatten(0, -1)?))
            .transpose()
    }

    fn own_outputs(&self, all: Tensor) -> Result<Tensor> {
        Ok(match &self.outputs {
            Some(outputs) => all.f_narrow(0, outputs.start as i64, outputs.len() as i64)?,
            None => all,
        })
    }

    /// The output for `x` [.., in].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.bias()? {
            Some(bias) => Ok(x.f_linear(&self.value()?, Some(&bias))?),
            None => self.product(x),
        }
    }

    /// The output without the bias.
    pub(crate) fn product(&self, x: &Tensor) -> Result<Tensor> {
        weight_gradients::linear(x, &self.value()?)
    }
}

//! The affine map.

use std::ops::Range;

use tch::Tensor;
use trainyard_mesh::Dim;

use crate::{Builder, Init, Module, Parameter, Result, weight_gradients};

/// `x · weightᵀ`, plus a bias if there is one.
#[derive(Module, Debug)]
pub struct Linear {
    weight: Parameter,
    bias: Option<Parameter>,
    /// Which outputs this rank computes of a weight it holds whole; all if absent.
    #[module(skip)]
    outputs: Option<Range<usize>>,
}

impl Linear {
    /// A map without bias; the weight is [out, in].
    pub fn build(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        init: Init,
    ) -> Result<Linear> {
        let weight = builder.parameter("weight", &[num_outputs, num_inputs], init)?;
        Ok(Linear::tied(weight))
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

    /// A map of which every tensor-parallel rank has some outputs; for
    /// [`TensorParallel::columns`](crate::TensorParallel::columns).
    pub fn column(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        init: Init,
    ) -> Result<Linear> {
        let shape = [num_outputs, num_inputs];
        Ok(Linear::tied(builder.cut("weight", &shape, Dim(0), init)?))
    }

    /// A map of which every tensor-parallel rank has some inputs; for
    /// [`TensorParallel::rows`](crate::TensorParallel::rows).
    pub fn row(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        init: Init,
    ) -> Result<Linear> {
        let shape = [num_outputs, num_inputs];
        Ok(Linear::tied(builder.cut("weight", &shape, Dim(1), init)?))
    }

    /// A map whose weight every tensor-parallel rank holds whole, to compute `outputs` with, which
    /// others may compute too.
    pub fn shared(
        builder: &Builder,
        num_inputs: usize,
        num_outputs: usize,
        outputs: Range<usize>,
        init: Init,
    ) -> Result<Linear> {
        Ok(Linear {
            outputs: Some(outputs),
            ..Linear::tied(builder.shared("weight", &[num_outputs, num_inputs], init)?)
        })
    }

    /// The same with a bias, zero at first, that ranks hold as they hold the weight: some outputs each,
    /// or all.
    pub fn and_bias(self, builder: &Builder, num_outputs: usize) -> Result<Linear> {
        let shape = [num_outputs];
        let bias = match self.outputs {
            Some(_) => builder.shared("bias", &shape, Init::Zeros)?,
            None => builder.cut("bias", &shape, Dim(0), Init::Zeros)?,
        };
        Ok(Linear {
            bias: Some(bias),
            ..self
        })
    }

    /// A map that uses a weight another module owns: a tied head.
    pub fn tied(weight: Parameter) -> Linear {
        Linear {
            weight,
            bias: None,
            outputs: None,
        }
    }

    /// The weight of the outputs this rank computes, as layers compute with it.
    pub(crate) fn value(&self) -> Result<Tensor> {
        self.own_outputs(self.weight.value()?)
    }

    /// The bias of those outputs.
    pub(crate) fn bias(&self) -> Result<Option<Tensor>> {
        let bias = self.bias.as_ref().map(Parameter::value).transpose()?;
        bias.map(|bias| self.own_outputs(bias)).transpose()
    }

    fn own_outputs(&self, all: Tensor) -> Result<Tensor> {
        Ok(match &self.outputs {
            Some(outputs) => all.f_narrow(0, outputs.start as i64, outputs.len() as i64)?,
            None => all,
        })
    }

    /// The output for `x` [.., in].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let bias = self.bias()?;
        if bias.is_none() && weight_gradients::has_choice() {
            return weight_gradients::linear(x, &self.value()?);
        }
        Ok(x.f_linear(&self.value()?, bias.as_ref())?)
    }
}

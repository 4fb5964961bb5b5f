//! The gated feed-forward layer: SwiGLU or GeGLU.

use tch::Tensor;
use trainyard_arch::Activation;

use super::Linear;
use crate::{Builder, Init, Module, Result, TensorParallel};

/// `down(f(gate(x)) · up(x))`, with an activation function `f`.
#[derive(Module, Debug)]
pub struct GatedMlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    #[module(skip)]
    function: Activation,
    #[module(skip)]
    tp: TensorParallel,
}

impl GatedMlp {
    /// From hidden size `width` to `inner_width` and back.
    pub fn build(
        builder: &Builder,
        width: usize,
        inner_width: usize,
        function: Activation,
        init: Init,
    ) -> Result<GatedMlp> {
        Ok(GatedMlp {
            gate_proj: Linear::colwise(&builder.push("gate_proj"), width, inner_width, init)?,
            up_proj: Linear::colwise(&builder.push("up_proj"), width, inner_width, init)?,
            down_proj: Linear::rowwise(&builder.push("down_proj"), inner_width, width, init)?,
            function,
            tp: builder.tensor_parallel(),
        })
    }

    /// The output for `x` [.., width].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = self.tp.colwise(x, [&self.gate_proj, &self.up_proj])?;
        let gate = match self.function {
            Activation::Silu => gate.f_silu()?,
            Activation::GeluTanh => gate.f_gelu("tanh")?,
        };
        self.tp.rowwise(&gate.f_mul(&up)?, &self.down_proj)
    }
}

//! The SwiGLU feed-forward layer.

use tch::Tensor;

use super::Linear;
use crate::{Builder, Init, Module, Result, TensorParallel};

/// `down(silu(gate(x)) · up(x))`.
#[derive(Module, Debug)]
pub struct SwiGlu {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    #[module(skip)]
    tp: TensorParallel,
}

impl SwiGlu {
    /// From hidden size `width` to `inner_width` and back.
    pub fn build(
        builder: &Builder,
        width: usize,
        inner_width: usize,
        init: Init,
    ) -> Result<SwiGlu> {
        Ok(SwiGlu {
            gate_proj: Linear::colwise(&builder.push("gate_proj"), width, inner_width, init)?,
            up_proj: Linear::colwise(&builder.push("up_proj"), width, inner_width, init)?,
            down_proj: Linear::rowwise(&builder.push("down_proj"), inner_width, width, init)?,
            tp: builder.tensor_parallel(),
        })
    }

    /// The output for `x` [.., width].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = self.tp.colwise(x, [&self.gate_proj, &self.up_proj])?;
        self.tp
            .rowwise(&gate.f_silu()?.f_mul(&up)?, &self.down_proj)
    }
}

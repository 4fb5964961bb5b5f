//! The gated feed-forward part of a block.

use tch::Tensor;

use super::Linear;
use crate::{Builder, Init, Module, Result};

/// `down(silu(gate(x)) · up(x))`.
#[derive(Module, Debug)]
pub struct SwiGlu {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl SwiGlu {
    /// From `width` to `inner_width` and back.
    pub fn build(
        builder: &Builder,
        width: usize,
        inner_width: usize,
        init: Init,
    ) -> Result<SwiGlu> {
        Ok(SwiGlu {
            gate_proj: Linear::build(&builder.at("gate_proj"), width, inner_width, init)?,
            up_proj: Linear::build(&builder.at("up_proj"), width, inner_width, init)?,
            down_proj: Linear::build(&builder.at("down_proj"), inner_width, width, init)?,
        })
    }

    /// The output for `x` [.., width].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = self.gate_proj.forward(x)?.f_silu()?;
        self.down_proj
            .forward(&gate.f_mul(&self.up_proj.forward(x)?)?)
    }
}

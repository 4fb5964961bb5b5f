//! Causal self-attention whose query heads share key and value heads in groups.

use tch::Tensor;
use trainyard_torch::kernel;

use super::{Linear, Rope};
use crate::{Builder, Init, Module, Result};

/// The sizes of an attention layer.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct AttentionSizes {
    /// Elements of a position.
    pub width: usize,
    /// Heads of queries.
    pub num_heads: usize,
    /// Heads of keys and values; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// Grouped-query causal attention with rotated positions.
#[derive(Module, Debug)]
pub struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    #[module(skip)]
    rope: Rope,
    head_dim: i64,
}

impl Attention {
    /// A layer of these sizes.
    pub fn build(
        builder: &Builder,
        sizes: &AttentionSizes,
        rope: &Rope,
        init: Init,
    ) -> Result<Attention> {
        let width = sizes.width;
        let q_width = sizes.num_heads * sizes.head_dim;
        let kv_width = sizes.num_kv_heads * sizes.head_dim;
        Ok(Attention {
            q_proj: Linear::build(&builder.at("q_proj"), width, q_width, init)?,
            k_proj: Linear::build(&builder.at("k_proj"), width, kv_width, init)?,
            v_proj: Linear::build(&builder.at("v_proj"), width, kv_width, init)?,
            o_proj: Linear::build(&builder.at("o_proj"), q_width, width, init)?,
            rope: rope.clone(),
            head_dim: sizes.head_dim as i64,
        })
    }

    /// The output for `x` [batch, seq, width].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let q = self.rope.rotate(&self.heads(&self.q_proj, x)?)?;
        let k = self.rope.rotate(&self.heads(&self.k_proj, x)?)?;
        let v = self.heads(&self.v_proj, x)?;
        let mixed = kernel::attention(
            &q.f_transpose(1, 2)?,
            &k.f_transpose(1, 2)?,
            &v.f_transpose(1, 2)?,
            true,
        )?;
        self.o_proj
            .forward(&mixed.f_transpose(1, 2)?.f_flatten(-2, -1)?)
    }

    /// [batch, seq, heads, head_dim]; how many heads is read from the projection, which may hold
    /// only some.
    fn heads(&self, projection: &Linear, x: &Tensor) -> Result<Tensor> {
        Ok(projection
            .forward(x)?
            .f_unflatten(-1, [-1, self.head_dim])?)
    }
}

//! Causal self-attention whose query heads share key and value heads in groups.

use tch::Tensor;

use super::{Linear, RmsNorm, Rope};
use crate::{Builder, ContextParallel, Init, Module, NnError, Result, TensorParallel};

/// The sizes of an attention layer.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct AttentionSizes {
    /// Elements of a position.
    pub width: usize,
    /// Heads of queries.
    pub num_heads: usize,
    /// Heads of keys and values; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether queries, keys and values have a bias.
    pub has_bias: bool,
    /// Added under the root where every head of queries and keys is normed.
    pub norm_eps: Option<f64>,
}

/// Grouped-query causal attention with rotated positions. Tensor-parallel ranks have some heads each,
/// context-parallel ranks some positions.
#[derive(Module, Debug)]
pub struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    #[module(skip)]
    rope: Rope,
    head_dim: i64,
    #[module(skip)]
    tp: TensorParallel,
    #[module(skip)]
    cp: ContextParallel,
}

impl Attention {
    /// A layer of these sizes.
    pub fn build(
        builder: &Builder,
        sizes: &AttentionSizes,
        rope: &Rope,
        init: Init,
    ) -> Result<Attention> {
        let (width, q_width) = (sizes.width, sizes.num_heads * sizes.head_dim);
        let tp = builder.tensor_parallel();
        tp.share("num_attention_heads", sizes.num_heads)?;
        // Every rank norms its own heads with the one scale.
        let norm = |name| {
            let norm = sizes.norm_eps;
            norm.map(|eps| RmsNorm::shared(&builder.at(name), sizes.head_dim, eps))
                .transpose()
        };
        Ok(Attention {
            q_proj: heads_map(&builder.at("q_proj"), sizes, sizes.num_heads, init)?,
            k_proj: heads_map(&builder.at("k_proj"), sizes, sizes.num_kv_heads, init)?,
            v_proj: heads_map(&builder.at("v_proj"), sizes, sizes.num_kv_heads, init)?,
            o_proj: Linear::row(&builder.at("o_proj"), q_width, width, init)?,
            q_norm: norm("q_norm")?,
            k_norm: norm("k_norm")?,
            rope: rope.clone(),
            head_dim: sizes.head_dim as i64,
            cp: builder.context_parallel(),
            tp,
        })
    }

    /// The output for `x` [batch, seq, width].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let maps = [&self.q_proj, &self.k_proj, &self.v_proj];
        let [q, k, v] = self.tp.columns(x, maps)?;
        let normed = |heads: Tensor, norm: &Option<RmsNorm>| match norm {
            Some(norm) => norm.forward(&heads),
            None => Ok(heads),
        };
        let q = self.rope.rotate(&normed(self.heads(&q)?, &self.q_norm)?)?;
        let k = self.rope.rotate(&normed(self.heads(&k)?, &self.k_norm)?)?;
        let mixed = self.cp.attention(&q, &k, &self.heads(&v)?)?;
        self.tp.rows(&mixed.f_flatten(-2, -1)?, &self.o_proj)
    }

    /// [batch, seq, heads, head_dim]; how many heads is read from the projection, which may hold
    /// only some.
    fn heads(&self, projected: &Tensor) -> Result<Tensor> {
        Ok(projected.f_unflatten(-1, [-1, self.head_dim])?)
    }
}

/// The map to some heads. Where ranks are more than heads, several compute the same head: all hold the
/// whole map then, which is small, and add up its gradients.
fn heads_map(
    builder: &Builder,
    sizes: &AttentionSizes,
    num_heads: usize,
    init: Init,
) -> Result<Linear> {
    let tp = builder.tensor_parallel();
    let (num_inputs, num_outputs) = (sizes.width, num_heads * sizes.head_dim);
    let map = if num_heads.is_multiple_of(tp.size()) {
        Linear::column(builder, num_inputs, num_outputs, init)?
    } else if tp.size().is_multiple_of(num_heads) {
        let head = tp.index() * num_heads / tp.size();
        let outputs = head * sizes.head_dim..(head + 1) * sizes.head_dim;
        Linear::shared(builder, num_inputs, num_outputs, outputs, init)?
    } else {
        return Err(NnError::Uneven {
            what: "num_key_value_heads".to_owned(),
            length: num_heads,
            num_ranks: tp.size(),
        });
    };
    match sizes.has_bias {
        true => map.and_bias(builder, num_outputs),
        false => Ok(map),
    }
}

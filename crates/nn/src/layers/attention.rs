//! Causal self-attention with grouped queries (GQA) and RoPE.

use tch::Tensor;
use trainyard_arch::{Norm, QkNorm};

use super::qk_norm::HeadNorm;
use super::{Linear, Rope};
use crate::{Builder, ContextParallel, Documents, Init, Module, NnError, Result, TensorParallel};

/// The configuration of an attention layer.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// The hidden size.
    pub hidden_size: usize,
    /// The number of query heads.
    pub num_heads: usize,
    /// The number of KV heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// The dimension of a head.
    pub head_dim: usize,
    /// Whether the query, key and value projections have a bias.
    pub has_bias: bool,
    /// The norm of queries and keys and its epsilon, if there is one.
    pub norm: Option<(QkNorm, Norm, f64)>,
    /// The factor of queries beside the root of the width of a head.
    pub scale: f64,
    /// The number of positions that a query attends to; all if absent.
    pub window: Option<usize>,
}

/// Causal grouped-query attention with RoPE. Tensor-parallel ranks have some heads each, context-parallel ranks some
/// positions.
#[derive(Module, Debug)]
pub struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: Option<HeadNorm>,
    k_norm: Option<HeadNorm>,
    #[module(skip)]
    rope: Rope,
    head_dim: i64,
    scale: f64,
    #[module(skip)]
    window: Option<usize>,
    #[module(skip)]
    tp: TensorParallel,
    #[module(skip)]
    cp: ContextParallel,
}

impl Attention {
    /// Builds a layer with this configuration.
    pub fn build(
        builder: &Builder,
        config: &AttentionConfig,
        rope: &Rope,
        init: Init,
    ) -> Result<Attention> {
        let (width, q_width) = (config.hidden_size, config.num_heads * config.head_dim);
        let tp = builder.tensor_parallel();
        tp.shard_range("num_attention_heads", config.num_heads)?;
        let norm = |name, num_heads| {
            let build =
                |norm| HeadNorm::build(&builder.push(name), norm, num_heads, config.head_dim);
            config.norm.map(build).transpose()
        };
        Ok(Attention {
            q_proj: head_projection(&builder.push("q_proj"), config, config.num_heads, init)?,
            k_proj: head_projection(&builder.push("k_proj"), config, config.num_kv_heads, init)?,
            v_proj: head_projection(&builder.push("v_proj"), config, config.num_kv_heads, init)?,
            o_proj: Linear::rowwise(&builder.push("o_proj"), q_width, width, init)?,
            q_norm: norm("q_norm", config.num_heads)?,
            k_norm: norm("k_norm", config.num_kv_heads)?,
            rope: rope.clone(),
            head_dim: config.head_dim as i64,
            scale: config.scale,
            window: config.window,
            cp: builder.context_parallel(),
            tp,
        })
    }

    /// The output for `x` [batch, seq, width], with document masking if `documents` is given.
    pub fn forward(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let [q, k, v] = self.tp.colwise(x, projections)?;
        let normalize = |heads: Tensor, norm: &Option<HeadNorm>| match norm {
            Some(norm) => norm.forward(&heads),
            None => Ok(heads),
        };
        let q = self
            .rope
            .rotate(&normalize(self.heads(&q)?, &self.q_norm)?)?;
        let k = self
            .rope
            .rotate(&normalize(self.heads(&k)?, &self.k_norm)?)?;
        let q = if self.scale == 1.0 {
            q
        } else {
            q.f_mul_scalar(self.scale)?
        };
        let v = self.heads(&v)?;
        let output = self.cp.attention(&q, &k, &v, documents, self.window)?;
        self.tp.rowwise(&output.f_flatten(-2, -1)?, &self.o_proj)
    }

    /// Reshapes to [batch, seq, heads, head_dim]; the number of heads follows from the projection, of which this rank
    /// may have a shard.
    fn heads(&self, projected: &Tensor) -> Result<Tensor> {
        Ok(projected.f_unflatten(-1, [-1, self.head_dim])?)
    }
}

/// The projection to some heads. If there are more ranks than KV heads, several ranks compute the same head: the
/// projection, which is small, is replicated then, and its partial gradients are reduced.
fn head_projection(
    builder: &Builder,
    config: &AttentionConfig,
    num_heads: usize,
    init: Init,
) -> Result<Linear> {
    let tp = builder.tensor_parallel();
    let (num_inputs, num_outputs) = (config.hidden_size, num_heads * config.head_dim);
    let projection = if num_heads.is_multiple_of(tp.size()) {
        Linear::colwise(builder, num_inputs, num_outputs, init)?
    } else if tp.size().is_multiple_of(num_heads) {
        let head = tp.index() * num_heads / tp.size();
        let outputs = head * config.head_dim..(head + 1) * config.head_dim;
        Linear::replicated(builder, num_inputs, num_outputs, outputs, init)?
    } else {
        return Err(NnError::NotDivisible {
            what: "num_key_value_heads".to_owned(),
            length: num_heads,
            num_ranks: tp.size(),
        });
    };
    if config.has_bias {
        projection.add_bias(builder, num_outputs)
    } else {
        Ok(projection)
    }
}

//! Multi-head latent attention (MLA), as in DeepSeek-V3.
//!
//! Queries, keys and values are projected to narrow latents and from there to heads. The latents belong to the
//! activations between pairs: every tensor-parallel rank projects its positions, and the narrow latents are gathered
//! instead of the wide activation. Of each query and key head one part is rotated; that part of the keys is shared by
//! all heads.

use tch::Tensor;
use trainyard_arch::{DecoderConfig, LatentAttention as LatentSizes};

use super::{Linear, RmsNorm, Rope};
use crate::{Builder, ContextParallel, Documents, Init, Module, Result, TensorParallel};

/// Added to the mean square of latents, whatever `rms_norm_eps` is.
const EPS: f64 = 1e-6;

/// The projection of queries: through a latent, or directly.
#[derive(Module, Debug)]
struct QueryLatent {
    q_a_proj: Linear,
    q_a_layernorm: RmsNorm,
}

/// A layer of multi-head latent attention.
#[derive(Module, Debug)]
pub struct LatentAttention {
    query_latent: Option<QueryLatent>,
    /// `q_b_proj`, or `q_proj` without a latent.
    query: Linear,
    kv_a_proj_with_mqa: Linear,
    kv_a_layernorm: RmsNorm,
    kv_b_proj: Linear,
    o_proj: Linear,
    #[module(skip)]
    sizes: LatentSizes,
    /// The factor of queries beside the root of the width of a head.
    #[module(skip)]
    scale: f64,
    #[module(skip)]
    rope: Rope,
    #[module(skip)]
    tp: TensorParallel,
    #[module(skip)]
    cp: ContextParallel,
}

impl LatentAttention {
    /// Builds a layer with these sizes.
    pub fn build(
        builder: &Builder,
        config: &DecoderConfig,
        sizes: &LatentSizes,
        rope: &Rope,
        init: Init,
    ) -> Result<LatentAttention> {
        let (width, heads) = (config.hidden_size, config.num_attention_heads);
        let tp = builder.tensor_parallel();
        tp.shard_range("num_attention_heads", heads)?;
        let at = |name: &str| builder.push(name);
        let query_width = heads * sizes.qk_head_dim();
        let query_latent = sizes.q_lora_rank.map(|rank| -> Result<QueryLatent> {
            Ok(QueryLatent {
                q_a_proj: Linear::positionwise(&at("q_a_proj"), width, rank, init)?,
                q_a_layernorm: RmsNorm::build(&at("q_a_layernorm"), rank, EPS)?,
            })
        });
        let rank = sizes.kv_lora_rank;
        let expanded = heads * (sizes.qk_nope_head_dim + sizes.v_head_dim);
        let narrow = rank + sizes.qk_rope_head_dim;
        let kv_a = at("kv_a_proj_with_mqa");
        let scaling = config.rope_scaling.as_ref();
        Ok(LatentAttention {
            query_latent: query_latent.transpose()?,
            query: match sizes.q_lora_rank {
                Some(rank) => Linear::colwise(&at("q_b_proj"), rank, query_width, init)?,
                None => Linear::colwise(&at("q_proj"), width, query_width, init)?,
            },
            kv_a_proj_with_mqa: Linear::positionwise(&kv_a, width, narrow, init)?,
            kv_a_layernorm: RmsNorm::build(&at("kv_a_layernorm"), rank, EPS)?,
            kv_b_proj: Linear::colwise(&at("kv_b_proj"), rank, expanded, init)?,
            o_proj: Linear::rowwise(&at("o_proj"), heads * sizes.v_head_dim, width, init)?,
            sizes: *sizes,
            scale: scaling.map_or(1.0, |scaling| scaling.softmax_scale_factor()),
            rope: rope.clone(),
            cp: builder.context_parallel(),
            tp,
        })
    }

    /// The output for `x` [batch, seq, width], with document masking if `documents` is given.
    pub fn forward(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        let LatentSizes {
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            ..
        } = self.sizes;
        let (nope, rotated) = (qk_nope_head_dim as i64, qk_rope_head_dim as i64);
        let (rank, values) = (kv_lora_rank as i64, v_head_dim as i64);
        let of_query = match &self.query_latent {
            Some(latent) => latent.q_a_layernorm.forward(&latent.q_a_proj.forward(x)?)?,
            None => x.shallow_clone(),
        };
        let narrow = self.kv_a_proj_with_mqa.forward(x)?;
        let of_kv = self
            .kv_a_layernorm
            .forward(&narrow.f_narrow(-1, 0, rank)?)?;
        let shared = narrow.f_narrow(-1, rank, rotated)?;
        // One collective for all of them.
        let widths = [of_query.size()[2], rank, rotated];
        let latents = Tensor::f_cat(&[of_query, of_kv, shared], -1)?;
        let latents = self.tp.gather_input(&latents)?;
        let latents = latents.f_split_with_sizes(widths, -1)?;

        let q = self.query.product(&latents[0])?;
        let q = q.f_unflatten(-1, [-1, nope + rotated])?;
        let kv = self.kv_b_proj.product(&latents[1])?;
        let kv = kv.f_unflatten(-1, [-1, nope + values])?;
        let num_heads = q.size()[2];
        let of_keys = self.rotate(&latents[2].f_unsqueeze(2)?)?;
        let of_keys = of_keys.f_expand([-1, -1, num_heads, -1], false)?;
        let of_queries = self.rotate(&q.f_narrow(-1, nope, rotated)?)?;
        let mut q = Tensor::f_cat(&[q.f_narrow(-1, 0, nope)?, of_queries], -1)?;
        if self.scale != 1.0 {
            q = q.f_mul_scalar(self.scale)?;
        }
        let k = Tensor::f_cat(&[kv.f_narrow(-1, 0, nope)?, of_keys], -1)?;
        // Attention wants values as wide as keys.
        let v = kv.f_narrow(-1, nope, values)?;
        let v = v.f_constant_pad_nd([0, nope + rotated - values])?;
        let output = self.cp.attention(&q, &k, &v, documents, None)?;
        let output = output.f_narrow(-1, 0, values)?.f_flatten(-2, -1)?;
        self.tp.rowwise(&output, &self.o_proj)
    }

    /// Rotates pairs of neighbors, which the rotary embedding here has in the halves of a head.
    fn rotate(&self, heads: &Tensor) -> Result<Tensor> {
        let pairs = heads.f_unflatten(-1, [-1, 2])?;
        self.rope
            .rotate(&pairs.f_transpose(-1, -2)?.f_flatten(-2, -1)?)
    }
}

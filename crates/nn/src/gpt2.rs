//! GPT-2: a decoder-only transformer with learned position embeddings, with Hugging Face's parameter names. Without the causal
//! mask its blocks are those of an encoder.
//!
//! Its matrices are [in, out]. One matrix projects queries, keys and values. It is viewed as [in, 3, out]: the same
//! elements in the same order, so that tensor-parallel ranks have some heads of each.

use tch::Tensor;
use trainyard_arch::DecoderConfig;

use crate::transformer_block::{AttentionHalf, FeedForwardHalf, Head, TransformerBlock};
use crate::{
    Builder, Context, ContextParallel, Documents, Init, Module, NnError, Parameter, Result,
    TensorParallel, Unit,
    layers::{Dropout, Embedding, LayerNorm, Linear, PositionEmbedding},
};

/// The initialization of the projections that add to the residual stream, scaled down by their number.
fn residual_init(config: &DecoderConfig) -> Init {
    Init::with_std(STD / (2.0 * config.num_hidden_layers as f64).sqrt())
}

/// The standard deviation of initial weights, except of projections that add to the residual stream.
const STD: f64 = 0.02;

/// The units of a GPT-2 for sequences of up to `seq_len` tokens.
pub(crate) fn units(
    config: &DecoderConfig,
    seq_len: usize,
    root: &Builder,
) -> Result<Vec<Box<dyn Unit>>> {
    let trunk = root.push("transformer");
    let embed = Embed::build(config, seq_len, &trunk)?;
    let tied = config.tie_word_embeddings.then_some(&embed.wte);
    let sizes = [config.hidden_size, config.vocab_size];
    let norm = LayerNorm::build(&trunk.push("ln_f"), config.hidden_size, config.norm_eps)?;
    let head = Head::build(root, norm, sizes, tied, Init::with_std(STD))?;
    let mut units: Vec<Box<dyn Unit>> = vec![Box::new(embed)];
    for index in 0..config.num_hidden_layers {
        let builder = trunk.push(&format!("h.{index}"));
        units.push(Box::new(block(config, seq_len, &builder)?));
    }
    units.push(Box::new(head));
    Ok(units)
}

/// A block for sequences of up to `seq_len` positions.
pub(crate) fn block(
    config: &DecoderConfig,
    seq_len: usize,
    builder: &Builder,
) -> Result<TransformerBlock<Attention, FeedForward>> {
    let attention = Attention::build(config, builder)?;
    let mlp = FeedForward::build(config, builder)?;
    let dropouts = Dropout::pair(builder, ["attn", "mlp"], seq_len, config.resid_pdrop)?;
    Ok(TransformerBlock::new(builder, attention, mlp, dropouts))
}

/// The embedding unit: token and position embeddings.
#[derive(Module, Debug)]
struct Embed {
    name: String,
    wte: Embedding,
    wpe: PositionEmbedding,
}

impl Embed {
    fn build(config: &DecoderConfig, seq_len: usize, trunk: &Builder) -> Result<Embed> {
        let (init, width) = (Init::with_std(STD), config.hidden_size);
        let (wte, wpe) = (trunk.push("wte"), trunk.push("wpe"));
        let num_positions = config.max_position_embeddings;
        Ok(Embed {
            name: wte.path().to_owned(),
            wte: Embedding::build(&wte, config.vocab_size, width, init)?,
            wpe: PositionEmbedding::build(&wpe, num_positions, seq_len, width, init)?,
        })
    }
}

impl Unit for Embed {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        self.wpe.add_to(&self.wte.forward(x)?, x)
    }

    fn lookup_tables(&self) -> Vec<Parameter> {
        vec![self.wte.weight().clone()]
    }
}

/// The attention half of a block, with its norm.
#[derive(Module, Debug)]
pub(crate) struct Attention {
    ln_1: LayerNorm,
    c_attn: Linear,
    c_proj: Linear,
    head_dim: i64,
    is_causal: bool,
    #[module(skip)]
    tp: TensorParallel,
    #[module(skip)]
    cp: ContextParallel,
}

impl Attention {
    fn build(config: &DecoderConfig, builder: &Builder) -> Result<Attention> {
        let (width, attn) = (config.hidden_size, builder.push("attn"));
        let (init, last) = (Init::with_std(STD), residual_init(config));
        let tp = builder.tensor_parallel();
        tp.shard_range("num_attention_heads", config.num_attention_heads)?;
        Ok(Attention {
            ln_1: LayerNorm::build(&builder.push("ln_1"), width, config.norm_eps)?,
            c_attn: Linear::transposed_colwise(&attn.push("c_attn"), width, 3, width, init)?,
            c_proj: Linear::transposed_rowwise(&attn.push("c_proj"), width, width, last)?,
            head_dim: config.head_dim as i64,
            is_causal: config.is_causal,
            cp: builder.context_parallel(),
            tp,
        })
    }
}

impl AttentionHalf for Attention {
    fn forward(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        let [qkv] = self.tp.colwise(&self.ln_1.forward(x)?, [&self.c_attn])?;
        let heads = qkv.f_unflatten(-1, [3, -1, self.head_dim])?;
        let each = |number| heads.f_select(2, number);
        let (q, k, v) = (each(0)?, each(1)?, each(2)?);
        let output = match documents {
            _ if self.is_causal => self.cp.attention(&q, &k, &v, documents, None)?,
            None => self.cp.bidirectional_attention(&q, &k, &v)?,
            Some(_) => return Err(NnError::DocumentMaskInEncoder),
        };
        self.tp.rowwise(&output.f_flatten(-2, -1)?, &self.c_proj)
    }
}

/// The feed-forward half of a block, with its norm.
#[derive(Module, Debug)]
pub(crate) struct FeedForward {
    ln_2: LayerNorm,
    c_fc: Linear,
    c_proj: Linear,
    #[module(skip)]
    tp: TensorParallel,
}

impl FeedForward {
    fn build(config: &DecoderConfig, builder: &Builder) -> Result<FeedForward> {
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let mlp = builder.push("mlp");
        let (init, last) = (Init::with_std(STD), residual_init(config));
        Ok(FeedForward {
            ln_2: LayerNorm::build(&builder.push("ln_2"), width, config.norm_eps)?,
            c_fc: Linear::transposed_colwise(&mlp.push("c_fc"), width, 1, inner, init)?,
            c_proj: Linear::transposed_rowwise(&mlp.push("c_proj"), inner, width, last)?,
            tp: builder.tensor_parallel(),
        })
    }
}

impl FeedForwardHalf for FeedForward {
    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        let [inner] = self.tp.colwise(&self.ln_2.forward(x)?, [&self.c_fc])?;
        self.tp.rowwise(&inner.f_gelu("tanh")?, &self.c_proj)
    }
}

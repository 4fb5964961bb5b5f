//! A decoder-only transformer, with Hugging Face's parameter names: Llama and its relatives, and GPT-2.
//!
//! Its units are the embedding, every block, and the head, which includes the final norm. The families differ in where
//! blocks normalize, in attention and in the feed-forward layer, which may have experts; [`DecoderConfig`] says how.

use std::fmt;

use tch::Tensor;
use trainyard_arch::{DecoderConfig, NormPlacement};

use crate::transformer_block::{AttentionHalf, FeedForwardHalf, Head, TransformerBlock};
use crate::{
    Builder, Context, Documents, Init, MixtureOfExperts, Model, Module, Parameter, Result, Router,
    TensorParallel, Unit,
    comm_volume::CommVolume,
    gpt2,
    layers::{
        Attention, AttentionConfig, Dropout, Embedding, GatedMlp, LatentAttention, RmsNorm, Rope,
    },
};

/// The number of colwise/rowwise pairs: one of attention per block, and one of its dense feed-forward layer or shared
/// experts.
fn num_pairs(config: &DecoderConfig) -> usize {
    let shares = |index: &usize| match config.experts_of(*index) {
        Some(moe) => moe.n_shared_experts > 0,
        None => true,
    };
    let blocks = 0..config.num_hidden_layers;
    blocks.len() + blocks.filter(shares).count()
}

fn attention(config: &DecoderConfig, index: usize) -> AttentionConfig {
    AttentionConfig {
        hidden_size: config.hidden_size,
        num_heads: config.num_attention_heads,
        num_kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        has_bias: config.attention_bias,
        norm: config
            .qk_norm
            .map(|norm| (norm, config.norm, config.norm_eps)),
        scale: config
            .query_pre_attn_scalar
            .map_or(1.0, |scalar| (config.head_dim as f64 / scalar).sqrt()),
        window: config.window_of(index),
    }
}

/// The total width of what latent attention gathers of a token.
fn latent_width(config: &DecoderConfig) -> Option<usize> {
    let latent = config.latent.as_ref()?;
    let of_queries = latent.q_lora_rank.unwrap_or(config.hidden_size);
    Some(of_queries + latent.kv_lora_rank + latent.qk_rope_head_dim)
}

/// The standard deviation of initial weights.
const STD: f64 = 0.02;

/// A decoder-only transformer: its embedding, its blocks and its head.
#[derive(Module)]
pub struct Decoder {
    units: Vec<Box<dyn Unit>>,
    vocab_size: usize,
    #[module(skip)]
    tp: TensorParallel,
    #[module(skip)]
    comm_volume: CommVolume,
}

impl Decoder {
    /// Builds a model for sequences of up to `seq_len` tokens.
    pub fn build(config: &DecoderConfig, seq_len: usize, builder: &Builder) -> Result<Decoder> {
        config.check()?;
        config.check_trainable()?;
        Ok(Decoder {
            units: if config.is_gpt2() {
                gpt2::units(config, seq_len, builder)?
            } else {
                units(config, seq_len, builder)?
            },
            vocab_size: config.vocab_size,
            comm_volume: CommVolume::new(
                config.num_hidden_layers,
                num_pairs(config),
                &attention(config, 0),
                latent_width(config),
                builder,
            ),
            tp: builder.tensor_parallel(),
        })
    }
}

impl fmt::Debug for Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Decoder of {} units", self.units.len())
    }
}

impl Model for Decoder {
    fn units(&self) -> Vec<&dyn Unit> {
        self.units.iter().map(|unit| &**unit).collect()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        // A head that computes the loss in chunks returns it in place of logits.
        if output.dim() == 0 {
            return Ok(output.shallow_clone());
        }
        self.tp.cross_entropy_sum(output, targets, self.vocab_size)
    }

    fn layer_comm_bytes(&self, num_tokens: u64) -> Option<u64> {
        Some(self.comm_volume.sent(num_tokens))
    }
}

/// The units of Llama and its relatives.
fn units(config: &DecoderConfig, seq_len: usize, root: &Builder) -> Result<Vec<Box<dyn Unit>>> {
    let trunk = root.push("model");
    let ropes = Ropes::build(config, seq_len, root)?;
    let embed = Embed::build(config, &trunk.push("embed_tokens"))?;
    let tied = config.tie_word_embeddings.then_some(&embed.embedding);
    let sizes = [config.hidden_size, config.vocab_size];
    let norm = RmsNorm::of(config, &trunk.push("norm"), config.hidden_size)?;
    let head = Head::build(root, norm, sizes, tied, Init::with_std(STD))?;
    let mut units: Vec<Box<dyn Unit>> = vec![Box::new(embed)];
    for index in 0..config.num_hidden_layers {
        let builder = trunk.push(&format!("layers.{index}"));
        let rope = ropes.of(config, index);
        units.push(Box::new(block(config, index, seq_len, rope, &builder)?));
    }
    units.push(Box::new(head));
    Ok(units)
}

/// The rotary embeddings of blocks that attend to all positions, and of those that attend to a window.
struct Ropes {
    full: Rope,
    windowed: Option<Rope>,
}

impl Ropes {
    fn build(config: &DecoderConfig, seq_len: usize, builder: &Builder) -> Result<Ropes> {
        let latent = config.latent.as_ref();
        let width = latent.map_or(config.head_dim, |latent| latent.qk_rope_head_dim);
        let scaling = config.rope_scaling.as_ref();
        let window = config.sliding_window.as_ref();
        let windowed = window.and_then(|window| window.rope_local_base_freq);
        let windowed = windowed.map(|theta| Rope::build(builder, seq_len, width, theta, None));
        Ok(Ropes {
            full: Rope::build(builder, seq_len, width, config.rope_theta, scaling)?,
            windowed: windowed.transpose()?,
        })
    }

    /// That of block `index`.
    fn of(&self, config: &DecoderConfig, index: usize) -> &Rope {
        match (&self.windowed, config.window_of(index)) {
            (Some(windowed), Some(_)) => windowed,
            _ => &self.full,
        }
    }
}

/// The embedding unit.
#[derive(Module, Debug)]
struct Embed {
    name: String,
    embedding: Embedding,
    /// The factor of embeddings.
    scale: f64,
}

impl Embed {
    fn build(config: &DecoderConfig, builder: &Builder) -> Result<Embed> {
        let init = Init::with_std(STD);
        Ok(Embed {
            name: builder.path().to_owned(),
            embedding: Embedding::build(builder, config.vocab_size, config.hidden_size, init)?,
            scale: if config.scales_embedding {
                (config.hidden_size as f64).sqrt()
            } else {
                1.0
            },
        })
    }
}

impl Unit for Embed {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        let embedded = self.embedding.forward(x)?;
        if self.scale == 1.0 {
            return Ok(embedded);
        }
        Ok(embedded.f_mul_scalar(self.scale)?)
    }

    fn lookup_tables(&self) -> Vec<Parameter> {
        vec![self.embedding.weight().clone()]
    }
}

/// The names of a block's norms: before and after attention, before and after the feed-forward layer.
fn norm_names(placement: NormPlacement) -> [Option<&'static str>; 4] {
    match placement {
        NormPlacement::Before => [
            Some("input_layernorm"),
            None,
            Some("post_attention_layernorm"),
            None,
        ],
        NormPlacement::After => [
            None,
            Some("post_attention_layernorm"),
            None,
            Some("post_feedforward_layernorm"),
        ],
        NormPlacement::BeforeAndAfter => [
            Some("input_layernorm"),
            Some("post_attention_layernorm"),
            Some("pre_feedforward_layernorm"),
            Some("post_feedforward_layernorm"),
        ],
    }
}

/// `x`, normalized if there is a norm.
fn normalized(norm: Option<&RmsNorm>, x: &Tensor) -> Result<Tensor> {
    match norm {
        Some(norm) => norm.forward(x),
        None => Ok(x.shallow_clone()),
    }
}

/// The attention of a block.
#[derive(Debug)]
enum AnyAttention {
    Grouped(Box<Attention>),
    Latent(Box<LatentAttention>),
}

impl AnyAttention {
    fn build(
        config: &DecoderConfig,
        index: usize,
        rope: &Rope,
        builder: &Builder,
    ) -> Result<AnyAttention> {
        let init = Init::with_std(STD);
        Ok(match &config.latent {
            Some(sizes) => {
                let layer = LatentAttention::build(builder, config, sizes, rope, init)?;
                AnyAttention::Latent(Box::new(layer))
            }
            None => {
                let layer = Attention::build(builder, &attention(config, index), rope, init)?;
                AnyAttention::Grouped(Box::new(layer))
            }
        })
    }

    fn forward(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        match self {
            AnyAttention::Grouped(attention) => attention.forward(x, documents),
            AnyAttention::Latent(attention) => attention.forward(x, documents),
        }
    }
}

impl Module for AnyAttention {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        match self {
            AnyAttention::Grouped(attention) => attention.visit(visitor),
            AnyAttention::Latent(attention) => attention.visit(visitor),
        }
    }
}

/// The attention half of a block, with its norms.
#[derive(Module, Debug)]
struct NormedAttention {
    before: Option<RmsNorm>,
    self_attn: AnyAttention,
    after: Option<RmsNorm>,
}

impl AttentionHalf for NormedAttention {
    fn forward(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        let normed = normalized(self.before.as_ref(), x)?;
        let attended = self.self_attn.forward(&normed, documents)?;
        normalized(self.after.as_ref(), &attended)
    }
}

/// A dense feed-forward layer, or experts.
#[derive(Debug)]
enum FeedForward {
    Dense(GatedMlp),
    Experts(Box<MixtureOfExperts>),
}

impl FeedForward {
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        match self {
            FeedForward::Dense(mlp) => mlp.forward(x),
            FeedForward::Experts(mixture) => mixture.forward(x, cx),
        }
    }
}

impl Module for FeedForward {
    fn visit(&self, visitor: &mut dyn FnMut(&Parameter)) {
        match self {
            FeedForward::Dense(mlp) => mlp.visit(visitor),
            FeedForward::Experts(mixture) => mixture.visit(visitor),
        }
    }
}

/// The feed-forward half of a block, with its norms.
#[derive(Module, Debug)]
struct NormedFeedForward {
    before: Option<RmsNorm>,
    mlp: FeedForward,
    after: Option<RmsNorm>,
}

impl FeedForwardHalf for NormedFeedForward {
    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        let normed = normalized(self.before.as_ref(), x)?;
        let fed = self.mlp.forward(&normed, cx)?;
        normalized(self.after.as_ref(), &fed)
    }

    fn router(&self) -> Option<&Router> {
        match &self.mlp {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(mixture) => Some(mixture.router()),
        }
    }
}

/// The feed-forward layer of block `index`.
fn feed_forward(config: &DecoderConfig, index: usize, builder: &Builder) -> Result<FeedForward> {
    let (width, inner) = (config.hidden_size, config.intermediate_size);
    let init = Init::with_std(STD);
    Ok(match config.experts_of(index) {
        Some(moe) => {
            FeedForward::Experts(MixtureOfExperts::build(builder, index, width, moe, init)?.into())
        }
        None => {
            let function = config.hidden_act;
            FeedForward::Dense(GatedMlp::build(builder, width, inner, function, init)?)
        }
    })
}

/// Block `index`.
fn block(
    config: &DecoderConfig,
    index: usize,
    seq_len: usize,
    rope: &Rope,
    builder: &Builder,
) -> Result<TransformerBlock<NormedAttention, NormedFeedForward>> {
    let norm = |name: Option<&str>| {
        let build = |name| RmsNorm::of(config, &builder.push(name), config.hidden_size);
        name.map(build).transpose()
    };
    let [before, after, before_mlp, after_mlp] = norm_names(config.norm_placement);
    let mlp = feed_forward(config, index, &builder.push("mlp"))?;
    let attention = NormedAttention {
        before: norm(before)?,
        self_attn: AnyAttention::build(config, index, rope, &builder.push("self_attn"))?,
        after: norm(after)?,
    };
    let mlp = NormedFeedForward {
        before: norm(before_mlp)?,
        mlp,
        after: norm(after_mlp)?,
    };
    let names = ["self_attn", "mlp"];
    let dropouts = Dropout::pair(builder, names, seq_len, config.resid_pdrop)?;
    Ok(TransformerBlock::new(builder, attention, mlp, dropouts))
}

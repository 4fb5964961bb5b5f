//! A decoder-only transformer, with Hugging Face's parameter names: Llama and its relatives.
//!
//! Its units are the embedding, every block, and the head, which includes the final norm. The families differ in where
//! blocks normalize, in attention and in the feed-forward layer, which may have experts; [`DecoderConfig`] says how.

use std::rc::Rc;

use tch::Tensor;
use trainyard_arch::{DecoderConfig, NormPlacement};

use crate::{
    Builder, Context, Documents, Init, MixtureOfExperts, Model, Module, Parameter, Result, Router,
    TensorParallel, Unit,
    comm_volume::CommVolume,
    layers::{
        Attention, AttentionConfig, Dropout, Embedding, GatedMlp, LatentAttention, LmHead, RmsNorm,
        Rope,
    },
    recompute,
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

/// A decoder-only transformer.
#[derive(Module, Debug)]
pub struct Decoder {
    embed: Embed,
    blocks: Vec<Block>,
    head: Head,
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
        let trunk = builder.push("model");
        let ropes = Ropes::build(config, seq_len, builder)?;
        let embed = Embed::build(config, &trunk.push("embed_tokens"))?;
        let blocks = (0..config.num_hidden_layers)
            .map(|index| {
                let builder = trunk.push(&format!("layers.{index}"));
                Block::build(config, index, seq_len, ropes.of(config, index), &builder)
            })
            .collect::<Result<_>>()?;
        let head = Head::build(config, &embed.embedding, &trunk, builder)?;
        Ok(Decoder {
            embed,
            blocks,
            head,
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

impl Model for Decoder {
    fn units(&self) -> Vec<&dyn Unit> {
        let mut units: Vec<&dyn Unit> = Vec::with_capacity(self.blocks.len() + 2);
        units.push(&self.embed);
        units.extend(self.blocks.iter().map(|block| block as &dyn Unit));
        units.push(&self.head);
        units
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        self.tp.cross_entropy_sum(output, targets, self.vocab_size)
    }

    fn layer_comm_bytes(&self, num_tokens: u64) -> u64 {
        self.comm_volume.sent(num_tokens)
    }
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

impl NormedAttention {
    fn forward(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        let normed = normalized(self.before.as_ref(), x)?;
        let attended = self.self_attn.forward(&normed, documents)?;
        normalized(self.after.as_ref(), &attended)
    }
}

/// The feed-forward half of a block.
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

/// A transformer block: attention and a feed-forward layer with residual connections.
#[derive(Module, Debug)]
struct Block {
    name: String,
    /// Shared with backward, which may recompute it.
    attention: Rc<NormedAttention>,
    before_mlp: Option<RmsNorm>,
    mlp: FeedForward,
    after_mlp: Option<RmsNorm>,
    /// Dropout of the outputs of attention and of the feed-forward layer.
    #[module(skip)]
    dropouts: Option<[Dropout; 2]>,
}

impl Block {
    fn build(
        config: &DecoderConfig,
        index: usize,
        seq_len: usize,
        rope: &Rope,
        builder: &Builder,
    ) -> Result<Block> {
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let init = Init::with_std(STD);
        let mlp = builder.push("mlp");
        let mlp = match config.experts_of(index) {
            Some(moe) => {
                FeedForward::Experts(MixtureOfExperts::build(&mlp, index, width, moe, init)?.into())
            }
            None => {
                let function = config.hidden_act;
                FeedForward::Dense(GatedMlp::build(&mlp, width, inner, function, init)?)
            }
        };
        let norm = |name: Option<&str>| {
            let build = |name| RmsNorm::of(config, &builder.push(name), width);
            name.map(build).transpose()
        };
        let [before, after, before_mlp, after_mlp] = norm_names(config.norm_placement);
        Ok(Block {
            name: builder.path().to_owned(),
            attention: Rc::new(NormedAttention {
                before: norm(before)?,
                self_attn: AnyAttention::build(config, index, rope, &builder.push("self_attn"))?,
                after: norm(after)?,
            }),
            before_mlp: norm(before_mlp)?,
            mlp,
            after_mlp: norm(after_mlp)?,
            dropouts: Dropout::pair(builder, ["self_attn", "mlp"], seq_len, config.resid_pdrop)?,
        })
    }

    /// Applies dropout to the output of one half of the block.
    fn dropout(&self, half: usize, output: Tensor, cx: &Context) -> Result<Tensor> {
        match &self.dropouts {
            Some(dropouts) => dropouts[half].forward(&output, cx),
            None => Ok(output),
        }
    }
}

impl Unit for Block {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        let documents = cx.documents.clone();
        let attended = if cx.recompute_attention {
            let attention = Rc::clone(&self.attention);
            let again = move |x: &Tensor| attention.forward(x, documents.as_ref());
            recompute(x, Rc::new(again))?
        } else {
            self.attention.forward(x, documents.as_ref())?
        };
        let x = x.f_add(&self.dropout(0, attended, cx)?)?;
        let normed = normalized(self.before_mlp.as_ref(), &x)?;
        let fed = self.mlp.forward(&normed, cx)?;
        let fed = normalized(self.after_mlp.as_ref(), &fed)?;
        Ok(x.f_add(&self.dropout(1, fed, cx)?)?)
    }

    fn router(&self) -> Option<&Router> {
        match &self.mlp {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(mixture) => Some(mixture.router()),
        }
    }
}

/// The head unit: the final norm and the LM head.
#[derive(Module, Debug)]
struct Head {
    name: String,
    norm: RmsNorm,
    lm_head: LmHead,
}

impl Head {
    fn build(
        config: &DecoderConfig,
        embedding: &Embedding,
        trunk: &Builder,
        root: &Builder,
    ) -> Result<Head> {
        let (width, vocab_size) = (config.hidden_size, config.vocab_size);
        let builder = root.push("lm_head");
        Ok(Head {
            name: builder.path().to_owned(),
            norm: RmsNorm::of(config, &trunk.push("norm"), width)?,
            lm_head: if config.tie_word_embeddings {
                LmHead::tied(&builder, embedding)
            } else {
                LmHead::build(&builder, width, vocab_size, Init::with_std(STD))?
            },
        })
    }
}

impl Unit for Head {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        self.lm_head.forward(&self.norm.forward(x)?)
    }

    fn tied_parameters(&self) -> Vec<Parameter> {
        self.lm_head.tied_parameters()
    }
}

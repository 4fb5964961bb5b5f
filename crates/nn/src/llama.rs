//! Llama: a decoder of equal blocks, with Hugging Face's names for its parameters.
//!
//! Its units are the embedding, every block, and the head, which holds the final norm too. The
//! feed-forward part of a block may be a mixture of experts: then it is a Mixtral, or a Qwen-MoE.

use std::rc::Rc;

use tch::Tensor;

use crate::{
    Builder, Context, Documents, Init, MixtureOfExperts, Model, Module, MoeConfig, NnError,
    Parameter, Result, RopeScaling, Router, TensorParallel, Unit,
    layers::{Attention, AttentionSizes, Dropout, Embedding, LanguageHead, RmsNorm, Rope, SwiGlu},
    recomputed,
    traffic::Traffic,
};

/// The sizes of a Llama, under the keys of Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Tokens there are.
    pub vocab_size: usize,
    /// Elements of a position between blocks.
    pub hidden_size: usize,
    /// Elements of a position inside the feed-forward part.
    pub intermediate_size: usize,
    /// Blocks.
    pub num_hidden_layers: usize,
    /// Heads of queries.
    pub num_attention_heads: usize,
    /// Heads of keys and values.
    pub num_key_value_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The base of the rotations' frequencies.
    pub rope_theta: f64,
    /// How rotations are stretched; not at all if absent.
    pub rope_scaling: Option<RopeScaling>,
    /// Added to the mean square under the root.
    pub rms_norm_eps: f64,
    /// Whether the head uses the embedding's table.
    pub tie_word_embeddings: bool,
    /// Whether queries, keys and values have a bias, as Qwen 2 has it.
    pub attention_bias: bool,
    /// Whether every head of queries and keys is normed, as Qwen 3 has it.
    pub qk_norm: bool,
    /// Share of what attention and the feed-forward part add that training leaves out.
    pub resid_pdrop: f64,
    /// The experts of blocks that have them; none if absent.
    pub moe: Option<MoeConfig>,
}

impl LlamaConfig {
    /// A model for examples: two hundred thousand parameters, with every part a large one has.
    pub fn little() -> LlamaConfig {
        LlamaConfig {
            vocab_size: 256,
            hidden_size: 64,
            intermediate_size: 160,
            num_hidden_layers: 4,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 16,
            rope_theta: 10_000.0,
            rope_scaling: None,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: false,
            attention_bias: false,
            qk_norm: false,
            resid_pdrop: 0.0,
            moe: None,
        }
    }

    /// Refuses sizes that no model can have.
    pub fn validate(&self) -> Result<()> {
        let refuse = |reason: String| {
            Err(NnError::Sizes {
                model: "Llama",
                reason,
            })
        };
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            return refuse(format!(
                "num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})"
            ));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return refuse(format!(
                "head_dim ({}) must be even, since rotations turn pairs",
                self.head_dim
            ));
        }
        Ok(())
    }

    /// The experts of block `index`.
    fn experts(&self, index: usize) -> Option<&MoeConfig> {
        let moe = self.moe.as_ref();
        moe.filter(|moe| index >= moe.first_k_dense_replace)
    }

    /// Pairs of matrices that tensor-parallel ranks share: each block's of attention, and its dense
    /// feed-forward part or its shared experts.
    fn num_pairs(&self) -> usize {
        let shares = |index: &usize| match self.experts(*index) {
            Some(moe) => moe.n_shared_experts > 0,
            None => true,
        };
        let blocks = 0..self.num_hidden_layers;
        blocks.len() + blocks.filter(shares).count()
    }

    fn attention(&self) -> AttentionSizes {
        AttentionSizes {
            width: self.hidden_size,
            num_heads: self.num_attention_heads,
            num_kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            has_bias: self.attention_bias,
            norm_eps: self.qk_norm.then_some(self.rms_norm_eps),
        }
    }
}

/// Every matrix begins with this standard deviation.
const STD: f64 = 0.02;

/// The whole model.
#[derive(Module, Debug)]
pub struct Llama {
    embed: Embed,
    blocks: Vec<Block>,
    head: Head,
    num_words: usize,
    #[module(skip)]
    tp: TensorParallel,
    #[module(skip)]
    traffic: Traffic,
}

impl Llama {
    /// A model for sequences of up to `seq_len` tokens.
    pub fn build(config: &LlamaConfig, seq_len: usize, builder: &Builder) -> Result<Llama> {
        config.validate()?;
        let trunk = builder.at("model");
        let scaling = config.rope_scaling.as_ref();
        let (width, theta) = (config.head_dim, config.rope_theta);
        let rope = Rope::build(builder, seq_len, width, theta, scaling)?;
        let embed = Embed::build(config, &trunk.at("embed_tokens"))?;
        let blocks = (0..config.num_hidden_layers)
            .map(|index| {
                let builder = trunk.at(&format!("layers.{index}"));
                Block::build(config, index, seq_len, &rope, &builder)
            })
            .collect::<Result<_>>()?;
        let head = Head::build(config, &embed.embedding, &trunk, builder)?;
        Ok(Llama {
            embed,
            blocks,
            head,
            num_words: config.vocab_size,
            traffic: Traffic::new(
                config.num_hidden_layers,
                config.num_pairs(),
                &config.attention(),
                builder,
            ),
            tp: builder.tensor_parallel(),
        })
    }
}

impl Model for Llama {
    fn units(&self) -> Vec<&dyn Unit> {
        let mut units: Vec<&dyn Unit> = Vec::with_capacity(self.blocks.len() + 2);
        units.push(&self.embed);
        units.extend(self.blocks.iter().map(|block| block as &dyn Unit));
        units.push(&self.head);
        units
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        self.tp.cross_entropy_sum(output, targets, self.num_words)
    }

    fn sent_by_layers(&self, num_tokens: u64) -> u64 {
        self.traffic.sent(num_tokens)
    }
}

/// Tokens to vectors.
#[derive(Module, Debug)]
struct Embed {
    name: String,
    embedding: Embedding,
}

impl Embed {
    fn build(config: &LlamaConfig, builder: &Builder) -> Result<Embed> {
        let init = Init::with_std(STD);
        Ok(Embed {
            name: builder.path().to_owned(),
            embedding: Embedding::build(builder, config.vocab_size, config.hidden_size, init)?,
        })
    }
}

impl Unit for Embed {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        self.embedding.forward(x)
    }
}

/// The half of a block that mixes positions.
#[derive(Module, Debug)]
struct NormedAttention {
    input_layernorm: RmsNorm,
    self_attn: Attention,
}

impl NormedAttention {
    fn forward(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        self.self_attn
            .forward(&self.input_layernorm.forward(x)?, documents)
    }
}

/// The half of a block that computes with each position alone.
#[derive(Debug)]
enum FeedForward {
    Dense(SwiGlu),
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

/// Attention and a feed-forward part, each added to its input.
#[derive(Module, Debug)]
struct Block {
    name: String,
    /// Shared with backward, where it may be computed again.
    attention: Rc<NormedAttention>,
    post_attention_layernorm: RmsNorm,
    mlp: FeedForward,
    /// What is left out of what attention and the feed-forward part add.
    #[module(skip)]
    dropouts: Option<[Dropout; 2]>,
}

impl Block {
    fn build(
        config: &LlamaConfig,
        index: usize,
        seq_len: usize,
        rope: &Rope,
        builder: &Builder,
    ) -> Result<Block> {
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let init = Init::with_std(STD);
        let mlp = builder.at("mlp");
        let mlp = match config.experts(index) {
            Some(moe) => {
                FeedForward::Experts(MixtureOfExperts::build(&mlp, index, width, moe, init)?.into())
            }
            None => FeedForward::Dense(SwiGlu::build(&mlp, width, inner, init)?),
        };
        let norm = |name| RmsNorm::build(&builder.at(name), width, config.rms_norm_eps);
        Ok(Block {
            name: builder.path().to_owned(),
            attention: Rc::new(NormedAttention {
                input_layernorm: norm("input_layernorm")?,
                self_attn: Attention::build(
                    &builder.at("self_attn"),
                    &config.attention(),
                    rope,
                    init,
                )?,
            }),
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp,
            dropouts: Dropout::pair(builder, ["self_attn", "mlp"], seq_len, config.resid_pdrop)?,
        })
    }

    /// What dropout leaves of a part's output.
    fn left(&self, part: usize, output: Tensor, cx: &Context) -> Result<Tensor> {
        match &self.dropouts {
            Some(dropouts) => dropouts[part].forward(&output, cx),
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
        let attended = match cx.recompute_attention {
            true => {
                let attention = Rc::clone(&self.attention);
                let again = move |x: &Tensor| attention.forward(x, documents.as_ref());
                recomputed(x, Rc::new(again))?
            }
            false => self.attention.forward(x, documents.as_ref())?,
        };
        let x = x.f_add(&self.left(0, attended, cx)?)?;
        let normed = self.post_attention_layernorm.forward(&x)?;
        let fed = self.mlp.forward(&normed, cx)?;
        Ok(x.f_add(&self.left(1, fed, cx)?)?)
    }

    fn router(&self) -> Option<&Router> {
        match &self.mlp {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(mixture) => Some(mixture.router()),
        }
    }
}

/// The final norm, and vectors to logits.
#[derive(Module, Debug)]
struct Head {
    name: String,
    norm: RmsNorm,
    lm_head: LanguageHead,
}

impl Head {
    fn build(
        config: &LlamaConfig,
        embedding: &Embedding,
        trunk: &Builder,
        root: &Builder,
    ) -> Result<Head> {
        let (width, vocab_size) = (config.hidden_size, config.vocab_size);
        let builder = root.at("lm_head");
        Ok(Head {
            name: builder.path().to_owned(),
            norm: RmsNorm::build(&trunk.at("norm"), width, config.rms_norm_eps)?,
            lm_head: match config.tie_word_embeddings {
                true => LanguageHead::tied(&builder, embedding),
                false => LanguageHead::build(&builder, width, vocab_size, Init::with_std(STD))?,
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

    fn borrowed(&self) -> Vec<Parameter> {
        self.lm_head.borrowed()
    }
}

//! Llama: a decoder-only transformer, with Hugging Face's parameter names.
//!
//! Its units are the embedding, every block, and the head, which includes the final norm. With MoE feed-forward
//! layers it is a Mixtral or a Qwen-MoE.

use std::rc::Rc;

use tch::Tensor;

use crate::{
    Builder, Context, Documents, Init, MixtureOfExperts, Model, Module, MoeConfig, NnError,
    Parameter, Result, RopeScaling, Router, TensorParallel, Unit,
    comm_volume::CommVolume,
    layers::{Attention, AttentionConfig, Dropout, Embedding, LmHead, RmsNorm, Rope, SwiGlu},
    recompute,
};

/// The configuration of a Llama, with the keys of Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// The vocabulary size.
    pub vocab_size: usize,
    /// The hidden size.
    pub hidden_size: usize,
    /// The intermediate size of the feed-forward layer.
    pub intermediate_size: usize,
    /// The number of blocks (layers).
    pub num_hidden_layers: usize,
    /// The number of attention heads (query heads).
    pub num_attention_heads: usize,
    /// The number of KV heads.
    pub num_key_value_heads: usize,
    /// The dimension of a head.
    pub head_dim: usize,
    /// The base of the RoPE frequencies.
    pub rope_theta: f64,
    /// RoPE scaling for longer sequences, if any.
    pub rope_scaling: Option<RopeScaling>,
    /// The epsilon of RMSNorm.
    pub rms_norm_eps: f64,
    /// Whether the LM head uses the embedding table (tied embeddings).
    pub tie_word_embeddings: bool,
    /// Whether the query, key and value projections have a bias, as in Qwen 2.
    pub attention_bias: bool,
    /// Whether queries and keys are normalized per head, as in Qwen 3.
    pub qk_norm: bool,
    /// The dropout probability of the outputs of attention and of the feed-forward layer.
    pub resid_pdrop: f64,
    /// The MoE configuration of the blocks that have experts, if any.
    pub moe: Option<MoeConfig>,
}

impl LlamaConfig {
    /// A debug model for examples and tests: 200,000 parameters, with every component of a large model.
    pub fn debug() -> LlamaConfig {
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

    /// Checks that the sizes are consistent.
    pub fn validate(&self) -> Result<()> {
        let invalid = |reason: String| {
            Err(NnError::Sizes {
                model: "Llama",
                reason,
            })
        };
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            return invalid(format!(
                "num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})"
            ));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return invalid(format!(
                "head_dim ({}) must be even, because RoPE rotates pairs",
                self.head_dim
            ));
        }
        Ok(())
    }

    /// The MoE configuration of block `index`, if it has experts.
    fn experts(&self, index: usize) -> Option<&MoeConfig> {
        let moe = self.moe.as_ref();
        moe.filter(|moe| index >= moe.first_k_dense_replace)
    }

    /// The number of colwise/rowwise pairs: one of attention per block, and one of its dense feed-forward layer or
    /// shared experts.
    fn num_pairs(&self) -> usize {
        let shares = |index: &usize| match self.experts(*index) {
            Some(moe) => moe.n_shared_experts > 0,
            None => true,
        };
        let blocks = 0..self.num_hidden_layers;
        blocks.len() + blocks.filter(shares).count()
    }

    fn attention(&self) -> AttentionConfig {
        AttentionConfig {
            hidden_size: self.hidden_size,
            num_heads: self.num_attention_heads,
            num_kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            has_bias: self.attention_bias,
            norm_eps: self.qk_norm.then_some(self.rms_norm_eps),
        }
    }
}

/// The standard deviation of initial weights.
const STD: f64 = 0.02;

/// A Llama model.
#[derive(Module, Debug)]
pub struct Llama {
    embed: Embed,
    blocks: Vec<Block>,
    head: Head,
    vocab_size: usize,
    #[module(skip)]
    tp: TensorParallel,
    #[module(skip)]
    comm_volume: CommVolume,
}

impl Llama {
    /// Builds a model for sequences of up to `seq_len` tokens.
    pub fn build(config: &LlamaConfig, seq_len: usize, builder: &Builder) -> Result<Llama> {
        config.validate()?;
        let trunk = builder.push("model");
        let scaling = config.rope_scaling.as_ref();
        let (width, theta) = (config.head_dim, config.rope_theta);
        let rope = Rope::build(builder, seq_len, width, theta, scaling)?;
        let embed = Embed::build(config, &trunk.push("embed_tokens"))?;
        let blocks = (0..config.num_hidden_layers)
            .map(|index| {
                let builder = trunk.push(&format!("layers.{index}"));
                Block::build(config, index, seq_len, &rope, &builder)
            })
            .collect::<Result<_>>()?;
        let head = Head::build(config, &embed.embedding, &trunk, builder)?;
        Ok(Llama {
            embed,
            blocks,
            head,
            vocab_size: config.vocab_size,
            comm_volume: CommVolume::new(
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
        self.tp.cross_entropy_sum(output, targets, self.vocab_size)
    }

    fn layer_comm_bytes(&self, num_tokens: u64) -> u64 {
        self.comm_volume.sent(num_tokens)
    }
}

/// The embedding unit.
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

/// The attention half of a block, with its norm.
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

/// The feed-forward half of a block.
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

/// A transformer block: attention and a feed-forward layer with residual connections.
#[derive(Module, Debug)]
struct Block {
    name: String,
    /// Shared with backward, which may recompute it.
    attention: Rc<NormedAttention>,
    post_attention_layernorm: RmsNorm,
    mlp: FeedForward,
    /// Dropout of the outputs of attention and of the feed-forward layer.
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
        let mlp = builder.push("mlp");
        let mlp = match config.experts(index) {
            Some(moe) => {
                FeedForward::Experts(MixtureOfExperts::build(&mlp, index, width, moe, init)?.into())
            }
            None => FeedForward::Dense(SwiGlu::build(&mlp, width, inner, init)?),
        };
        let norm = |name| RmsNorm::build(&builder.push(name), width, config.rms_norm_eps);
        Ok(Block {
            name: builder.path().to_owned(),
            attention: Rc::new(NormedAttention {
                input_layernorm: norm("input_layernorm")?,
                self_attn: Attention::build(
                    &builder.push("self_attn"),
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
        let normed = self.post_attention_layernorm.forward(&x)?;
        let fed = self.mlp.forward(&normed, cx)?;
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
        config: &LlamaConfig,
        embedding: &Embedding,
        trunk: &Builder,
        root: &Builder,
    ) -> Result<Head> {
        let (width, vocab_size) = (config.hidden_size, config.vocab_size);
        let builder = root.push("lm_head");
        Ok(Head {
            name: builder.path().to_owned(),
            norm: RmsNorm::build(&trunk.push("norm"), width, config.rms_norm_eps)?,
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

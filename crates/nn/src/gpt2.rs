//! GPT-2: a decoder with learnt positions, with Hugging Face's names for its parameters.
//!
//! Its matrices are [in, out]. Queries, keys and values are made by one of them, which is seen as
//! [in, 3, out]: the same elements in the same order, and ranks that share it have some heads of each.

use std::rc::Rc;

use tch::Tensor;

use crate::{
    Builder, Context, ContextParallel, Documents, Init, Model, Module, NnError, Parameter, Result,
    TensorParallel, Unit,
    layers::{AttentionSizes, Dropout, Embedding, LanguageHead, LayerNorm, Linear, Positions},
    recomputed,
    traffic::Traffic,
};

/// The sizes of a GPT-2, under the names that newer models have for them.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// Tokens there are.
    pub vocab_size: usize,
    /// Elements of a position between blocks: `n_embd`.
    pub hidden_size: usize,
    /// Elements of a position inside the feed-forward part: `n_inner`.
    pub intermediate_size: usize,
    /// Blocks: `n_layer`.
    pub num_hidden_layers: usize,
    /// Heads: `n_head`.
    pub num_attention_heads: usize,
    /// Positions there are: `n_positions`.
    pub max_position_embeddings: usize,
    /// Added to the variance under the root.
    pub layer_norm_epsilon: f64,
    /// Whether the head uses the embedding's table.
    pub tie_word_embeddings: bool,
    /// Share of what attention and the feed-forward part add that training leaves out.
    pub resid_pdrop: f64,
}

impl Gpt2Config {
    /// Refuses sizes that no model can have.
    pub fn validate(&self) -> Result<()> {
        let (width, heads) = (self.hidden_size, self.num_attention_heads);
        match heads > 0 && width.is_multiple_of(heads) {
            true => Ok(()),
            false => Err(NnError::Sizes {
                model: "GPT-2",
                reason: format!("num_attention_heads ({heads}) must divide hidden_size ({width})"),
            }),
        }
    }

    fn attention(&self) -> AttentionSizes {
        AttentionSizes {
            width: self.hidden_size,
            num_heads: self.num_attention_heads,
            num_kv_heads: self.num_attention_heads,
            head_dim: self.hidden_size / self.num_attention_heads,
            has_bias: true,
            norm_eps: None,
        }
    }

    /// How the maps begin that add to the residual stream: the less, the more of them there are.
    fn residual_init(&self) -> Init {
        Init::with_std(STD / (2.0 * self.num_hidden_layers as f64).sqrt())
    }
}

/// Every matrix that does not add to the residual stream begins with this standard deviation.
const STD: f64 = 0.02;

/// The whole model.
#[derive(Module, Debug)]
pub struct Gpt2 {
    embed: Embed,
    blocks: Vec<Block>,
    head: Head,
    num_words: usize,
    #[module(skip)]
    tp: TensorParallel,
    #[module(skip)]
    traffic: Traffic,
}

impl Gpt2 {
    /// A model for sequences of up to `seq_len` tokens.
    pub fn build(config: &Gpt2Config, seq_len: usize, builder: &Builder) -> Result<Gpt2> {
        config.validate()?;
        let trunk = builder.at("transformer");
        let embed = Embed::build(config, seq_len, &trunk)?;
        let blocks = (0..config.num_hidden_layers)
            .map(|index| Block::build(config, seq_len, &trunk.at(&format!("h.{index}"))))
            .collect::<Result<_>>()?;
        let head = Head::build(config, &embed.wte, &trunk, builder)?;
        Ok(Gpt2 {
            embed,
            blocks,
            head,
            num_words: config.vocab_size,
            traffic: Traffic::new(
                config.num_hidden_layers,
                2 * config.num_hidden_layers,
                &config.attention(),
                builder,
            ),
            tp: builder.tensor_parallel(),
        })
    }
}

impl Model for Gpt2 {
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

/// Tokens and positions to vectors.
#[derive(Module, Debug)]
struct Embed {
    name: String,
    wte: Embedding,
    wpe: Positions,
}

impl Embed {
    fn build(config: &Gpt2Config, seq_len: usize, trunk: &Builder) -> Result<Embed> {
        let (init, width) = (Init::with_std(STD), config.hidden_size);
        let (words, places) = (trunk.at("wte"), trunk.at("wpe"));
        let num_positions = config.max_position_embeddings;
        Ok(Embed {
            name: words.path().to_owned(),
            wte: Embedding::build(&words, config.vocab_size, width, init)?,
            wpe: Positions::build(&places, num_positions, seq_len, width, init)?,
        })
    }
}

impl Unit for Embed {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        self.wpe.added(&self.wte.forward(x)?, x)
    }
}

/// The half of a block that mixes positions, with its norm.
#[derive(Module, Debug)]
struct Attention {
    ln_1: LayerNorm,
    c_attn: Linear,
    c_proj: Linear,
    head_dim: i64,
    #[module(skip)]
    tp: TensorParallel,
    #[module(skip)]
    cp: ContextParallel,
}

impl Attention {
    fn build(config: &Gpt2Config, builder: &Builder) -> Result<Attention> {
        let (width, maps) = (config.hidden_size, builder.at("attn"));
        let (init, last) = (Init::with_std(STD), config.residual_init());
        let tp = builder.tensor_parallel();
        tp.share("num_attention_heads", config.num_attention_heads)?;
        Ok(Attention {
            ln_1: LayerNorm::build(&builder.at("ln_1"), width, config.layer_norm_epsilon)?,
            c_attn: Linear::turned_columns(&maps.at("c_attn"), width, 3, width, init)?,
            c_proj: Linear::turned_row(&maps.at("c_proj"), width, width, last)?,
            head_dim: config.attention().head_dim as i64,
            cp: builder.context_parallel(),
            tp,
        })
    }

    fn forward(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        let [made] = self.tp.columns(&self.ln_1.forward(x)?, [&self.c_attn])?;
        let heads = made.f_unflatten(-1, [3, -1, self.head_dim])?;
        let each = |number| heads.f_select(2, number);
        let mixed = self
            .cp
            .attention(&each(0)?, &each(1)?, &each(2)?, documents)?;
        self.tp.rows(&mixed.f_flatten(-2, -1)?, &self.c_proj)
    }
}

/// The half of a block that computes with each position alone, with its norm.
#[derive(Module, Debug)]
struct FeedForward {
    ln_2: LayerNorm,
    c_fc: Linear,
    c_proj: Linear,
    #[module(skip)]
    tp: TensorParallel,
}

impl FeedForward {
    fn build(config: &Gpt2Config, builder: &Builder) -> Result<FeedForward> {
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let maps = builder.at("mlp");
        let (init, last) = (Init::with_std(STD), config.residual_init());
        Ok(FeedForward {
            ln_2: LayerNorm::build(&builder.at("ln_2"), width, config.layer_norm_epsilon)?,
            c_fc: Linear::turned_columns(&maps.at("c_fc"), width, 1, inner, init)?,
            c_proj: Linear::turned_row(&maps.at("c_proj"), inner, width, last)?,
            tp: builder.tensor_parallel(),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [inner] = self.tp.columns(&self.ln_2.forward(x)?, [&self.c_fc])?;
        self.tp.rows(&inner.f_gelu("tanh")?, &self.c_proj)
    }
}

/// Attention and a feed-forward part, each added to its input.
#[derive(Module, Debug)]
struct Block {
    name: String,
    /// Shared with backward, where it may be computed again.
    attention: Rc<Attention>,
    mlp: FeedForward,
    /// What is left out of what attention and the feed-forward part add.
    #[module(skip)]
    dropouts: Option<[Dropout; 2]>,
}

impl Block {
    fn build(config: &Gpt2Config, seq_len: usize, builder: &Builder) -> Result<Block> {
        Ok(Block {
            name: builder.path().to_owned(),
            attention: Rc::new(Attention::build(config, builder)?),
            mlp: FeedForward::build(config, builder)?,
            dropouts: Dropout::pair(builder, ["attn", "mlp"], seq_len, config.resid_pdrop)?,
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
        let fed = self.mlp.forward(&x)?;
        Ok(x.f_add(&self.left(1, fed, cx)?)?)
    }
}

/// The final norm, and vectors to logits.
#[derive(Module, Debug)]
struct Head {
    name: String,
    ln_f: LayerNorm,
    lm_head: LanguageHead,
}

impl Head {
    fn build(
        config: &Gpt2Config,
        embedding: &Embedding,
        trunk: &Builder,
        root: &Builder,
    ) -> Result<Head> {
        let (width, builder) = (config.hidden_size, root.at("lm_head"));
        Ok(Head {
            name: builder.path().to_owned(),
            ln_f: LayerNorm::build(&trunk.at("ln_f"), width, config.layer_norm_epsilon)?,
            lm_head: match config.tie_word_embeddings {
                true => LanguageHead::tied(&builder, embedding),
                false => {
                    LanguageHead::build(&builder, width, config.vocab_size, Init::with_std(STD))?
                }
            },
        })
    }
}

impl Unit for Head {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        self.lm_head.forward(&self.ln_f.forward(x)?)
    }

    fn borrowed(&self) -> Vec<Parameter> {
        self.lm_head.borrowed()
    }
}

//! GPT-2: a decoder-only transformer with learned position embeddings, with Hugging Face's parameter names.
//!
//! Its matrices are [in, out]. One matrix projects queries, keys and values. It is viewed as [in, 3, out]: the same
//! elements in the same order, so that tensor-parallel ranks have some heads of each.

use std::rc::Rc;

use tch::Tensor;
use trainyard_arch::DecoderConfig;

use crate::{
    Builder, Context, ContextParallel, Documents, Init, Model, Module, Parameter, Result,
    TensorParallel, Unit,
    comm_volume::CommVolume,
    layers::{AttentionConfig, Dropout, Embedding, LayerNorm, Linear, LmHead, PositionEmbedding},
    recompute,
};

fn attention(config: &DecoderConfig) -> AttentionConfig {
    AttentionConfig {
        hidden_size: config.hidden_size,
        num_heads: config.num_attention_heads,
        num_kv_heads: config.num_attention_heads,
        head_dim: config.head_dim,
        has_bias: true,
        norm: None,
        scale: 1.0,
        window: None,
    }
}

/// The initialization of the projections that add to the residual stream, scaled down by their number.
fn residual_init(config: &DecoderConfig) -> Init {
    Init::with_std(STD / (2.0 * config.num_hidden_layers as f64).sqrt())
}

/// The standard deviation of initial weights, except of projections that add to the residual stream.
const STD: f64 = 0.02;

/// A GPT-2 model.
#[derive(Module, Debug)]
pub struct Gpt2 {
    embed: Embed,
    blocks: Vec<Block>,
    head: Head,
    vocab_size: usize,
    #[module(skip)]
    tp: TensorParallel,
    #[module(skip)]
    comm_volume: CommVolume,
}

impl Gpt2 {
    /// Builds a model for sequences of up to `seq_len` tokens.
    pub fn build(config: &DecoderConfig, seq_len: usize, builder: &Builder) -> Result<Gpt2> {
        config.check()?;
        let trunk = builder.push("transformer");
        let embed = Embed::build(config, seq_len, &trunk)?;
        let blocks = (0..config.num_hidden_layers)
            .map(|index| Block::build(config, seq_len, &trunk.push(&format!("h.{index}"))))
            .collect::<Result<_>>()?;
        let head = Head::build(config, &embed.wte, &trunk, builder)?;
        Ok(Gpt2 {
            embed,
            blocks,
            head,
            vocab_size: config.vocab_size,
            comm_volume: CommVolume::new(
                config.num_hidden_layers,
                2 * config.num_hidden_layers,
                &attention(config),
                None,
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
        self.tp.cross_entropy_sum(output, targets, self.vocab_size)
    }

    fn layer_comm_bytes(&self, num_tokens: u64) -> u64 {
        self.comm_volume.sent(num_tokens)
    }
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
}

/// The attention half of a block, with its norm.
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
            cp: builder.context_parallel(),
            tp,
        })
    }

    fn forward(&self, x: &Tensor, documents: Option<&Documents>) -> Result<Tensor> {
        let [qkv] = self.tp.colwise(&self.ln_1.forward(x)?, [&self.c_attn])?;
        let heads = qkv.f_unflatten(-1, [3, -1, self.head_dim])?;
        let each = |number| heads.f_select(2, number);
        let output = self
            .cp
            .attention(&each(0)?, &each(1)?, &each(2)?, documents, None)?;
        self.tp.rowwise(&output.f_flatten(-2, -1)?, &self.c_proj)
    }
}

/// The feed-forward half of a block, with its norm.
#[derive(Module, Debug)]
struct FeedForward {
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

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [inner] = self.tp.colwise(&self.ln_2.forward(x)?, [&self.c_fc])?;
        self.tp.rowwise(&inner.f_gelu("tanh")?, &self.c_proj)
    }
}

/// A transformer block: attention and a feed-forward layer with residual connections.
#[derive(Module, Debug)]
struct Block {
    name: String,
    /// Shared with backward, which may recompute it.
    attention: Rc<Attention>,
    mlp: FeedForward,
    /// Dropout of the outputs of attention and of the feed-forward layer.
    #[module(skip)]
    dropouts: Option<[Dropout; 2]>,
}

impl Block {
    fn build(config: &DecoderConfig, seq_len: usize, builder: &Builder) -> Result<Block> {
        Ok(Block {
            name: builder.path().to_owned(),
            attention: Rc::new(Attention::build(config, builder)?),
            mlp: FeedForward::build(config, builder)?,
            dropouts: Dropout::pair(builder, ["attn", "mlp"], seq_len, config.resid_pdrop)?,
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
        let fed = self.mlp.forward(&x)?;
        Ok(x.f_add(&self.dropout(1, fed, cx)?)?)
    }
}

/// The head unit: the final norm and the LM head.
#[derive(Module, Debug)]
struct Head {
    name: String,
    ln_f: LayerNorm,
    lm_head: LmHead,
}

impl Head {
    fn build(
        config: &DecoderConfig,
        embedding: &Embedding,
        trunk: &Builder,
        root: &Builder,
    ) -> Result<Head> {
        let (width, builder) = (config.hidden_size, root.push("lm_head"));
        Ok(Head {
            name: builder.path().to_owned(),
            ln_f: LayerNorm::build(&trunk.push("ln_f"), width, config.norm_eps)?,
            lm_head: if config.tie_word_embeddings {
                LmHead::tied(&builder, embedding)
            } else {
                LmHead::build(&builder, width, config.vocab_size, Init::with_std(STD))?
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

    fn tied_parameters(&self) -> Vec<Parameter> {
        self.lm_head.tied_parameters()
    }
}

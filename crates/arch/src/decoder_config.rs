//! The description of a decoder-only transformer.

use serde::{Deserialize, Serialize};

use crate::{LatentAttention, MoeConfig, RopeScaling, SlidingWindow};

/// A decoder-only transformer of equal blocks; with experts, of leading dense blocks and equal blocks with experts.
/// Fields have the names of Hugging Face's `config.json` where it has them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecoderConfig {
    /// The model's name in reports.
    pub name: String,
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Hidden size: the width of the residual stream.
    pub hidden_size: usize,
    /// Width of a dense feed-forward layer.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key/value heads; divides the number of query heads.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// The longest sequence that the model accepts.
    pub max_position_embeddings: usize,
    /// Whether the output head shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Whether a position attends to itself and earlier ones only; an encoder attends to all.
    pub is_causal: bool,
    /// The kind of position embedding.
    pub positions: Positions,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies for sequences longer than in pretraining.
    pub rope_scaling: Option<RopeScaling>,
    /// The kind of normalization.
    pub norm: Norm,
    /// Added to the mean square or variance.
    pub norm_eps: f64,
    /// Where a block normalizes.
    pub norm_placement: NormPlacement,
    /// The kind of feed-forward layer.
    pub feed_forward: FeedForward,
    /// The function in feed-forward layers.
    pub hidden_act: Activation,
    /// Whether all linear layers have biases, as in GPT-2.
    pub has_biases: bool,
    /// Whether the projections to queries, keys and values have biases, as in Qwen 2.
    pub attention_bias: bool,
    /// How queries and keys are normalized, if they are.
    pub qk_norm: Option<QkNorm>,
    /// Attention divides by the root of this; by that of the head's width if absent.
    pub query_pre_attn_scalar: Option<f64>,
    /// Blocks that attend to the nearest positions only.
    pub sliding_window: Option<SlidingWindow>,
    /// Multi-head latent attention, as in DeepSeek.
    pub latent: Option<LatentAttention>,
    /// Whether embeddings are multiplied by the root of the hidden size, as in Gemma.
    pub scales_embedding: bool,
    /// Whether files have one matrix for queries, keys and values, and one for gate and up projection, as those of Phi.
    pub has_fused_projections: bool,
    /// The mixture of experts; a dense model if absent.
    pub moe: Option<MoeConfig>,
    /// Dropout probability of what is added to the residual stream. It belongs to the training: no `config.json` sets it.
    pub resid_pdrop: f64,
}

/// The kind of position embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    /// Rotary embedding of queries and keys.
    Rotary,
    /// A learned table that is added to the token embedding.
    Learned,
}

/// The kind of normalization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Norm {
    /// RMSNorm, with a scale.
    RootMeanSquare,
    /// RMSNorm whose scale is one more than its weight, as in Gemma.
    RootMeanSquarePlusOne,
    /// LayerNorm, with a scale and a bias.
    Layer,
}

/// Where a block normalizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormPlacement {
    /// The inputs of attention and of the feed-forward layer.
    Before,
    /// Their outputs, as in OLMo 2.
    After,
    /// Both, as in Gemma.
    BeforeAndAfter,
}

/// The kind of feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeedForward {
    /// Three matrices: gate and up projection, multiplied, then down projection (SwiGLU, GeGLU).
    Gated,
    /// Two matrices with an activation function between them.
    Plain,
}

/// The function in a feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU, approximated by a hyperbolic tangent.
    GeluTanh,
}

/// What of queries and keys is normalized together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// Every head, as in Qwen 3.
    Head,
    /// All heads of a token, as in OLMo 2.
    AllHeads,
}

impl DecoderConfig {
    /// A Llama for examples and tests: 200,000 parameters, with every component of a large model.
    pub fn debug() -> DecoderConfig {
        DecoderConfig {
            vocab_size: 256,
            hidden_size: 64,
            intermediate_size: 160,
            num_hidden_layers: 4,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 16,
            norm_eps: 1e-5,
            ..DecoderConfig::llama()
        }
    }

    /// A Llama without dimensions, which families and flavors fill in.
    pub(crate) fn llama() -> DecoderConfig {
        DecoderConfig {
            name: "llama".to_owned(),
            vocab_size: 0,
            hidden_size: 0,
            intermediate_size: 0,
            num_hidden_layers: 0,
            num_attention_heads: 0,
            num_key_value_heads: 0,
            head_dim: 0,
            max_position_embeddings: 2048,
            tie_word_embeddings: false,
            is_causal: true,
            positions: Positions::Rotary,
            rope_theta: 1e4,
            rope_scaling: None,
            norm: Norm::RootMeanSquare,
            norm_eps: 1e-6,
            norm_placement: NormPlacement::Before,
            feed_forward: FeedForward::Gated,
            hidden_act: Activation::Silu,
            has_biases: false,
            attention_bias: false,
            qk_norm: None,
            query_pre_attn_scalar: None,
            sliding_window: None,
            latent: None,
            scales_embedding: false,
            has_fused_projections: false,
            moe: None,
            resid_pdrop: 0.0,
        }
    }

    /// A GPT as in GPT-2 and Megatron: LayerNorm, biases, learned positions, tied embeddings, and a feed-forward layer
    /// of four times the hidden size.
    pub fn gpt(
        num_hidden_layers: usize,
        hidden_size: usize,
        num_attention_heads: usize,
        vocab_size: usize,
        max_position_embeddings: usize,
    ) -> DecoderConfig {
        DecoderConfig {
            name: "gpt".to_owned(),
            vocab_size,
            hidden_size,
            intermediate_size: hidden_size.saturating_mul(4),
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: num_attention_heads,
            head_dim: hidden_size / num_attention_heads.max(1),
            max_position_embeddings,
            tie_word_embeddings: true,
            positions: Positions::Learned,
            norm: Norm::Layer,
            norm_eps: 1e-5,
            feed_forward: FeedForward::Plain,
            hidden_act: Activation::GeluTanh,
            has_biases: true,
            attention_bias: true,
            ..DecoderConfig::llama()
        }
    }

    /// The smallest published GPT-2.
    pub fn gpt2() -> DecoderConfig {
        DecoderConfig {
            name: "gpt2".to_owned(),
            ..DecoderConfig::gpt(12, 768, 12, 50_257, 1024)
        }
    }

    /// An encoder of the size of BERT: the blocks of GPT-2, in which every position attends to all others.
    pub fn encoder() -> DecoderConfig {
        DecoderConfig {
            name: "encoder".to_owned(),
            is_causal: false,
            ..DecoderConfig::gpt(12, 768, 12, 30_522, 512)
        }
    }

    /// Whether this is a GPT-2 of some size, or an encoder of its blocks: it has names and a layout of parameters of its own.
    pub fn is_gpt2(&self) -> bool {
        // Most models differ in this, which is faster to compare than everything.
        if self.positions != Positions::Learned || self.hidden_size != self.query_width() {
            return false;
        }
        let plain = DecoderConfig::gpt(
            self.num_hidden_layers,
            self.hidden_size,
            self.num_attention_heads,
            self.vocab_size,
            self.max_position_embeddings,
        );
        let plain = DecoderConfig {
            name: self.name.clone(),
            intermediate_size: self.intermediate_size,
            tie_word_embeddings: self.tie_word_embeddings,
            is_causal: self.is_causal,
            norm_eps: self.norm_eps,
            rope_theta: self.rope_theta,
            resid_pdrop: self.resid_pdrop,
            ..plain
        };
        *self == plain
    }

    /// Total width of all query heads.
    pub fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Total width of all key heads, and of all value heads.
    pub fn key_value_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// The experts of block `index`, if it has some.
    pub fn experts_of(&self, index: usize) -> Option<&MoeConfig> {
        let moe = self.moe.as_ref();
        moe.filter(|moe| index >= moe.first_k_dense_replace)
    }

    /// The number of positions that block `index` attends to, if it does not attend to all.
    pub fn window_of(&self, index: usize) -> Option<usize> {
        let window = self.sliding_window.as_ref()?;
        window.applies_to(index).then_some(window.sliding_window)
    }

    /// The number of blocks with experts.
    pub fn num_expert_layers(&self) -> usize {
        let num_dense = |moe: &MoeConfig| moe.first_k_dense_replace;
        let num_dense = self.moe.as_ref().map_or(self.num_hidden_layers, num_dense);
        self.num_hidden_layers.saturating_sub(num_dense)
    }

    /// The number of blocks without experts.
    pub fn num_dense_layers(&self) -> usize {
        self.num_hidden_layers - self.num_expert_layers()
    }
}

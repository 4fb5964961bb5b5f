//! The shape of a decoder-only transformer of any supported family.

use serde::{Deserialize, Serialize};

/// The shape of a decoder of equal blocks; with experts, of leading dense blocks and equal expert blocks.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Shape {
    /// The model's name in reports.
    pub name: String,
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Hidden size: the dimension of the residual stream.
    pub hidden_size: usize,
    /// Intermediate size of a dense feed-forward layer.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key/value heads.
    pub num_key_value_heads: usize,
    /// Dimension of one head.
    pub head_dim: usize,
    /// The kind of feed-forward layer.
    pub feed_forward: FeedForward,
    /// The kind of normalization.
    pub norm: Norm,
    /// The kind of position embedding.
    pub positions: Positions,
    /// Whether linear layers have biases.
    pub has_biases: bool,
    /// Whether the output head shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// The longest sequence the model accepts.
    pub max_position_embeddings: usize,
    /// The experts of a mixture of experts.
    pub experts: Option<Experts>,
    /// Whether the query, key and value projections have biases, as in Qwen 2.
    pub attention_bias: bool,
    /// Whether queries and keys are normalized per head, as in Qwen 3.
    pub qk_norm: bool,
    /// Multi-head latent attention, as in DeepSeek.
    pub latent: Option<LatentAttention>,
}

/// Multi-head latent attention (MLA): queries, keys and values are projected through low-rank latents.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct LatentAttention {
    /// Rank of the query latent; `None` if queries are projected directly.
    pub q_lora_rank: Option<usize>,
    /// Rank of the key/value latent.
    pub kv_lora_rank: usize,
    /// Dimensions of a query and key head without rotary embedding.
    pub qk_nope_head_dim: usize,
    /// Dimensions with rotary embedding; heads share these in keys.
    pub qk_rope_head_dim: usize,
    /// Dimension of a value head.
    pub v_head_dim: usize,
}

/// The kind of feed-forward layer.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FeedForward {
    /// Three matrices: gate and up projection, multiplied, then down projection (SwiGLU).
    Gated,
    /// Two matrices with an activation function between them.
    Plain,
}

/// The kind of normalization.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Norm {
    /// RMSNorm, with a scale.
    RootMeanSquare,
    /// LayerNorm, with a scale and a bias.
    Layer,
}

/// The kind of position embedding.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    /// Rotary embedding of queries and keys.
    Rotary,
    /// A learned table that is added to the token embedding.
    Learned,
}

/// The experts of a mixture of experts.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Experts {
    /// Number of routed experts per layer.
    pub num_experts: usize,
    /// Number of routed experts per token (top-k).
    pub num_experts_per_tok: usize,
    /// Intermediate size of a routed expert.
    pub moe_intermediate_size: usize,
    /// Number of shared experts, which process every token.
    pub num_shared_experts: usize,
    /// Intermediate size of a shared expert.
    pub shared_intermediate_size: usize,
    /// Number of leading blocks without experts.
    pub num_dense_layers: usize,
    /// Whether a learned gate scales the output of the shared experts.
    pub has_shared_gate: bool,
    /// Whether the router has a bias per expert for load balancing.
    pub has_router_bias: bool,
}

impl Experts {
    /// Experts in every layer, without shared ones.
    pub fn plain(num_experts: usize, num_experts_per_tok: usize, width: usize) -> Experts {
        Experts {
            num_experts,
            num_experts_per_tok,
            moe_intermediate_size: width,
            num_shared_experts: 0,
            shared_intermediate_size: 0,
            num_dense_layers: 0,
            has_shared_gate: false,
            has_router_bias: false,
        }
    }
}

impl From<&trainyard_config::MoeConfig> for Experts {
    fn from(moe: &trainyard_config::MoeConfig) -> Experts {
        Experts {
            num_shared_experts: moe.n_shared_experts,
            shared_intermediate_size: match moe.n_shared_experts {
                0 => 0,
                _ => moe.moe_intermediate_size,
            },
            num_dense_layers: moe.first_k_dense_replace,
            has_router_bias: moe.bias_update_rate.is_some(),
            ..Experts::plain(
                moe.num_experts,
                moe.num_experts_per_tok,
                moe.moe_intermediate_size,
            )
        }
    }
}

impl Shape {
    /// A plain GPT as Megatron trains it: LayerNorm, biases, an intermediate size of four times the hidden size,
    /// learned positions and tied embeddings.
    pub fn gpt(
        num_hidden_layers: usize,
        hidden_size: usize,
        num_attention_heads: usize,
        vocab_size: usize,
        max_position_embeddings: usize,
    ) -> Shape {
        Shape {
            name: "gpt".to_owned(),
            vocab_size,
            hidden_size,
            intermediate_size: 4 * hidden_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: num_attention_heads,
            head_dim: hidden_size / num_attention_heads.max(1),
            feed_forward: FeedForward::Plain,
            norm: Norm::Layer,
            positions: Positions::Learned,
            has_biases: true,
            tie_word_embeddings: true,
            max_position_embeddings,
            experts: None,
            attention_bias: true,
            qk_norm: false,
            latent: None,
        }
    }

    /// The number of blocks with experts.
    pub fn num_expert_layers(&self) -> usize {
        match &self.experts {
            Some(experts) => self
                .num_hidden_layers
                .saturating_sub(experts.num_dense_layers),
            None => 0,
        }
    }
}

impl From<&trainyard_config::LlamaConfig> for Shape {
    fn from(llama: &trainyard_config::LlamaConfig) -> Shape {
        Shape {
            name: "llama".to_owned(),
            vocab_size: llama.vocab_size,
            hidden_size: llama.hidden_size,
            intermediate_size: llama.intermediate_size,
            num_hidden_layers: llama.num_hidden_layers,
            num_attention_heads: llama.num_attention_heads,
            num_key_value_heads: llama.num_key_value_heads,
            head_dim: llama.head_dim,
            feed_forward: FeedForward::Gated,
            norm: Norm::RootMeanSquare,
            positions: Positions::Rotary,
            has_biases: false,
            tie_word_embeddings: llama.tie_word_embeddings,
            max_position_embeddings: llama.max_position_embeddings,
            experts: llama.moe.as_ref().map(Experts::from),
            attention_bias: llama.attention_bias,
            qk_norm: llama.qk_norm,
            latent: None,
        }
    }
}

impl From<&trainyard_config::Gpt2Config> for Shape {
    fn from(gpt2: &trainyard_config::Gpt2Config) -> Shape {
        Shape {
            name: "gpt2".to_owned(),
            intermediate_size: gpt2.intermediate_size,
            tie_word_embeddings: gpt2.tie_word_embeddings,
            ..Shape::gpt(
                gpt2.num_hidden_layers,
                gpt2.hidden_size,
                gpt2.num_attention_heads,
                gpt2.vocab_size,
                gpt2.max_position_embeddings,
            )
        }
    }
}

/// Fails for models that are not decoders.
impl TryFrom<&trainyard_config::ModelSpec> for Shape {
    type Error = NotADecoder;

    fn try_from(spec: &trainyard_config::ModelSpec) -> Result<Shape, NotADecoder> {
        match spec {
            trainyard_config::ModelSpec::Llama(llama) => Ok(Shape::from(llama)),
            trainyard_config::ModelSpec::Gpt2(gpt2) => Ok(Shape::from(gpt2)),
            trainyard_config::ModelSpec::Cnn => Err(NotADecoder),
        }
    }
}

/// The model is not a decoder of equal blocks.
#[derive(Copy, Clone, Debug, PartialEq, thiserror::Error)]
#[error("the model is not a decoder-only transformer")]
pub struct NotADecoder;

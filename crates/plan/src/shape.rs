//! The shape of a decoder, whichever family it is of.

use serde::{Deserialize, Serialize};

/// The shape of a decoder of equal blocks; where it has experts, of two kinds of blocks.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Shape {
    /// What people call it.
    pub name: String,
    /// Number of different tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside a dense feed-forward part.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key/value heads.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// How the feed-forward part is made.
    pub feed_forward: FeedForward,
    /// How rows are normed.
    pub norm: Norm,
    /// Where positions come from.
    pub positions: Positions,
    /// Whether matrices have biases.
    pub has_biases: bool,
    /// Whether the head uses the embedding's table.
    pub tie_word_embeddings: bool,
    /// Longest sequence the model accepts.
    pub max_position_embeddings: usize,
    /// The experts, in a mixture of them.
    pub experts: Option<Experts>,
    /// Whether queries, keys and values have biases where other matrices have none, as in Qwen 2.
    pub attention_bias: bool,
    /// Whether every head of queries and keys is normed, as in Qwen 3.
    pub qk_norm: bool,
    /// Queries, keys and values through narrow latents, as in DeepSeek.
    pub latent: Option<LatentAttention>,
}

/// Attention whose queries, keys and values come through narrow latents.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct LatentAttention {
    /// Width of the queries' latent; none where queries come straight from the stream.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub kv_lora_rank: usize,
    /// The part of a head's query and key that is not rotated.
    pub qk_nope_head_dim: usize,
    /// The part that is rotated; keys share it between heads.
    pub qk_rope_head_dim: usize,
    /// Width of a head's value.
    pub v_head_dim: usize,
}

/// How a feed-forward part is made.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FeedForward {
    /// Three matrices: gate and up, multiplied, then down.
    Gated,
    /// Two matrices with an activation between them.
    Plain,
}

/// How rows are normed.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Norm {
    /// By their root mean square, with a scale.
    RootMeanSquare,
    /// By mean and deviation, with a scale and a bias.
    Layer,
}

/// Where positions come from.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    /// Queries and keys are rotated.
    Rotary,
    /// A learnt table is added to the embedding.
    Learnt,
}

/// The experts of a mixture.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Experts {
    /// How many a layer has.
    pub num_experts: usize,
    /// How many each token goes to.
    pub num_experts_per_tok: usize,
    /// Width inside an expert.
    pub moe_intermediate_size: usize,
    /// Experts that every token goes to.
    pub num_shared_experts: usize,
    /// Width inside a shared expert.
    pub shared_intermediate_size: usize,
    /// Blocks at the beginning that have no experts.
    pub num_dense_layers: usize,
    /// Whether a learnt gate weighs what the shared experts give.
    pub has_shared_gate: bool,
    /// Whether the router keeps one number per expert that balances their load.
    pub has_router_bias: bool,
}

impl Experts {
    /// The same count of experts everywhere, no shared ones.
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
    /// A plain GPT as Megatron trains it: layer norms, biases, a width of four, a table of positions and
    /// a head that is the embedding.
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
            positions: Positions::Learnt,
            has_biases: true,
            tie_word_embeddings: true,
            max_position_embeddings,
            experts: None,
            attention_bias: true,
            qk_norm: false,
            latent: None,
        }
    }

    /// How many blocks have experts.
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

/// Models that are no decoders have no shape.
impl TryFrom<&trainyard_config::ModelSpec> for Shape {
    type Error = NoDecoder;

    fn try_from(spec: &trainyard_config::ModelSpec) -> Result<Shape, NoDecoder> {
        match spec {
            trainyard_config::ModelSpec::Llama(llama) => Ok(Shape::from(llama)),
            trainyard_config::ModelSpec::Gpt2(gpt2) => Ok(Shape::from(gpt2)),
            trainyard_config::ModelSpec::Cnn => Err(NoDecoder),
        }
    }
}

/// A model that is no decoder of equal blocks.
#[derive(Copy, Clone, Debug, PartialEq, thiserror::Error)]
#[error("the model is no decoder of equal blocks")]
pub struct NoDecoder;

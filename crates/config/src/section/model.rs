//! `[model]`: the model and its dimensions.
//!
//! A flavor is a complete set of dimensions; the keys with Hugging Face names override some of them.

use std::path::PathBuf;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};
use trainyard_arch::{Flavor, RopeScaling};

use super::MoeSection;
use crate::Choice;

/// The family of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelName {
    /// Llama decoder.
    #[default]
    #[serde(rename = "llama")]
    Llama,
    /// GPT-2 decoder.
    #[serde(rename = "gpt2")]
    Gpt2,
    /// Encoder of GPT-2's blocks without the causal mask, which learns to restore masked tokens, as BERT.
    #[serde(rename = "encoder")]
    Encoder,
    /// Two convolutions and two linear layers, for 28 x 28 images.
    #[serde(rename = "cnn")]
    Cnn,
    /// Vision transformer for 28 x 28 images, in patches of 7 x 7.
    #[serde(rename = "vit")]
    Vit,
}

/// The attention mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttentionMask {
    /// All earlier positions.
    #[default]
    #[serde(rename = "causal")]
    Causal,
    /// Earlier positions of the same document.
    #[serde(rename = "block_causal")]
    BlockCausal,
}

/// `[model]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSection {
    /// The family of the model, or one that the program registers.
    pub name: Choice<ModelName>,
    /// The flavor; `tiny` if absent. Llama only.
    pub flavor: Option<Flavor>,
    /// Vocabulary size.
    pub vocab_size: Option<usize>,
    /// Hidden size.
    pub hidden_size: Option<usize>,
    /// Width of the MLP.
    pub intermediate_size: Option<usize>,
    /// Number of transformer blocks.
    pub num_hidden_layers: Option<usize>,
    /// Number of query heads.
    pub num_attention_heads: Option<usize>,
    /// Number of KV heads; divides the number of query heads.
    pub num_key_value_heads: Option<usize>,
    /// Width of one head; `hidden_size / num_attention_heads` if absent.
    pub head_dim: Option<usize>,
    /// Base of the rotary embedding.
    pub rope_theta: Option<f64>,
    /// Rotary scaling for longer sequences, as in Llama 3.1.
    pub rope_scaling: Option<RopeScaling>,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: Option<f64>,
    /// Added to the variance in LayerNorm. GPT-2 only.
    pub layer_norm_epsilon: Option<f64>,
    /// Whether the output head shares the weights of the embedding.
    pub tie_word_embeddings: Option<bool>,
    /// Whether queries, keys and values have a bias, as in Qwen 2.
    pub attention_bias: Option<bool>,
    /// Whether every head of queries and keys is normalized, as in Qwen 3.
    pub qk_norm: Option<bool>,
    /// The number of positions that blocks with a sliding window attend to, in a model that has such blocks.
    pub sliding_window: Option<usize>,
    /// Width of the latent of queries, in a model with latent attention.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub kv_lora_rank: Option<usize>,
    /// Width of the part of a latent-attention head that is not rotated.
    pub qk_nope_head_dim: Option<usize>,
    /// Width of the part that is rotated.
    pub qk_rope_head_dim: Option<usize>,
    /// Width of a value head.
    pub v_head_dim: Option<usize>,
    /// Maximum sequence length.
    pub max_position_embeddings: Option<usize>,
    /// Dropout probability of what attention and the MLP add to the residual stream.
    pub resid_pdrop: Option<f64>,
    /// The attention mask: `causal` (all earlier positions), or `block_causal` (only those of the same document, which
    /// `training.eos_token_id` ends).
    pub attn_mask_type: AttentionMask,
    /// Mixture of experts; Llama only.
    pub moe: Option<MoeSection>,
    /// A Hugging Face folder whose `config.json` replaces name and flavor.
    pub hf_assets_path: Option<PathBuf>,
    /// A safetensors file with initial weights, instead of weights generated from the seed.
    pub initial_weights: Option<PathBuf>,
}

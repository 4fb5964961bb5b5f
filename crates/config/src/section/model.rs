//! `[model]`: which model, and its shape.
//!
//! A flavor gives a complete shape; the keys with Hugging Face names change parts of it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::MoeSection;
use crate::RopeScaling;

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
    /// Two convolutions and two linear layers, for 28 x 28 images.
    #[serde(rename = "cnn")]
    Cnn,
}

/// What attention may see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttentionMask {
    /// Everything before.
    #[default]
    #[serde(rename = "causal")]
    Causal,
    /// What came before in the same document.
    #[serde(rename = "block_causal")]
    BlockCausal,
}

/// A complete published or built-in shape of the Llama decoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Flavor {
    /// 1.05 M parameters.
    #[default]
    #[serde(rename = "tiny")]
    Tiny,
    /// 27.8 M parameters.
    #[serde(rename = "small")]
    Small,
    /// 8.03 B parameters.
    #[serde(rename = "llama3-8b")]
    Llama3_8b,
    /// 70.6 B parameters.
    #[serde(rename = "llama3-70b")]
    Llama3_70b,
    /// 405.9 B parameters.
    #[serde(rename = "llama3-405b")]
    Llama3_405b,
}

/// `[model]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSection {
    /// The family.
    pub name: ModelName,
    /// The shape to start from; `tiny` if absent. Llama only.
    pub flavor: Option<Flavor>,
    /// Number of different tokens.
    pub vocab_size: Option<usize>,
    /// Width of the residual stream.
    pub hidden_size: Option<usize>,
    /// Width inside the MLP.
    pub intermediate_size: Option<usize>,
    /// Number of blocks.
    pub num_hidden_layers: Option<usize>,
    /// Number of query heads.
    pub num_attention_heads: Option<usize>,
    /// Number of key/value heads; divides the query heads.
    pub num_key_value_heads: Option<usize>,
    /// Width of one head; `hidden_size / num_attention_heads` if absent.
    pub head_dim: Option<usize>,
    /// Base of the rotary embedding.
    pub rope_theta: Option<f64>,
    /// How rotations are stretched over longer sequences, as Llama 3.1 has it.
    pub rope_scaling: Option<RopeScaling>,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: Option<f64>,
    /// Added to the variance in LayerNorm. GPT-2 only.
    pub layer_norm_epsilon: Option<f64>,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: Option<bool>,
    /// Whether queries, keys and values have a bias, as Qwen 2 has it.
    pub attention_bias: Option<bool>,
    /// Whether every head of queries and keys is normed, as Qwen 3 has it.
    pub qk_norm: Option<bool>,
    /// Longest sequence the model accepts.
    pub max_position_embeddings: Option<usize>,
    /// Share of what attention and the MLP add to the residual stream that training leaves out.
    pub resid_pdrop: Option<f64>,
    /// What attention may see: `causal`, everything before, or `block_causal`, the same document alone,
    /// which `training.eos_token_id` ends.
    pub attn_mask_type: AttentionMask,
    /// The experts of blocks that have them; Llama only.
    pub moe: Option<MoeSection>,
    /// A folder of Hugging Face's with the model's `config.json`, which takes the place of the family
    /// and the flavor.
    pub hf_assets_path: Option<PathBuf>,
    /// A safetensors file to start from, instead of weights made from the seed.
    pub initial_weights: Option<PathBuf>,
}

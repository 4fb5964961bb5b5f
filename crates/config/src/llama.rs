//! The dimensions of a Llama decoder: published ones, validation, and parameter counts.

use serde::{Deserialize, Serialize};

use crate::section::within;
use crate::{ConfigError, Flavor, MoeConfig};

/// The rotary scaling of Llama 3.1 for sequences longer than in pretraining: low frequencies are divided by `factor`, high
/// frequencies stay, and those between are interpolated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// The divisor of low frequencies.
    pub factor: f64,
    /// Frequencies with fewer turns than this over the original length are low.
    pub low_freq_factor: f64,
    /// Frequencies with more turns than this are high.
    pub high_freq_factor: f64,
    /// The original maximum sequence length.
    pub original_max_position_embeddings: usize,
}

/// The dimensions of a Llama decoder, with the names of Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Hidden size.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of transformer blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of KV heads.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Rotary scaling; none if absent.
    pub rope_scaling: Option<RopeScaling>,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Whether the output head shares the weights of the embedding.
    pub tie_word_embeddings: bool,
    /// Whether queries, keys and values have a bias, as in Qwen 2.
    pub attention_bias: bool,
    /// Whether every head of queries and keys is normalized, as in Qwen 3.
    pub qk_norm: bool,
    /// Maximum sequence length.
    pub max_position_embeddings: usize,
    /// Dropout probability of what is added to the residual stream.
    pub resid_pdrop: f64,
    /// The mixture of experts; a dense model if absent.
    pub moe: Option<MoeConfig>,
}

impl LlamaConfig {
    /// The dimensions of a published or built-in flavor.
    pub fn of(flavor: Flavor) -> LlamaConfig {
        // vocabulary, hidden, MLP, layers, heads, KV heads, theta, maximum sequence length
        let (vocab, hidden, mlp, layers, heads, kv_heads, theta, longest) = match flavor {
            Flavor::Tiny => (1024, 128, 384, 4, 4, 2, 1e4, 2048),
            Flavor::Small => (4096, 512, 1408, 8, 8, 4, 1e4, 2048),
            Flavor::Llama3_8b => (128_256, 4096, 14_336, 32, 32, 8, 5e5, 8192),
            Flavor::Llama3_70b => (128_256, 8192, 28_672, 80, 64, 8, 5e5, 8192),
            Flavor::Llama3_405b => (128_256, 16_384, 53_248, 126, 128, 8, 5e5, 131_072),
        };
        LlamaConfig {
            vocab_size: vocab,
            hidden_size: hidden,
            intermediate_size: mlp,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim: hidden / heads,
            rope_theta: theta,
            rope_scaling: None,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: false,
            attention_bias: false,
            qk_norm: false,
            max_position_embeddings: longest,
            resid_pdrop: 0.0,
            moe: None,
        }
    }

    /// Total width of all query heads.
    pub fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Total width of all key heads, and of all value heads.
    pub fn key_value_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Number of dense blocks.
    pub fn num_dense_layers(&self) -> usize {
        match &self.moe {
            Some(moe) => moe.first_k_dense_replace.min(self.num_hidden_layers),
            None => self.num_hidden_layers,
        }
    }

    /// The number of parameters, in closed form.
    pub fn num_parameters(&self) -> u64 {
        self.with_experts(self.moe.as_ref().map_or(0, |moe| moe.num_experts))
    }

    /// The number of active parameters per token, in closed form.
    pub fn num_active_parameters(&self) -> u64 {
        self.with_experts(self.moe.as_ref().map_or(0, |moe| moe.num_experts_per_tok))
    }

    /// The number of parameters, counting `num_experts` experts per block.
    fn with_experts(&self, num_experts: usize) -> u64 {
        let hidden = self.hidden_size as u64;
        let embedding = self.vocab_size as u64 * hidden;
        let attention = 2 * hidden * (self.query_width() + self.key_value_width()) as u64;
        let mlp = 3 * hidden * self.intermediate_size as u64;
        let norms = 2 * hidden;
        let head = if self.tie_word_embeddings {
            0
        } else {
            embedding
        };
        let biases = if self.attention_bias {
            (self.query_width() + 2 * self.key_value_width()) as u64
        } else {
            0
        };
        let head_norms = if self.qk_norm {
            2 * self.head_dim as u64
        } else {
            0
        };
        let block = attention + norms + biases + head_norms;
        let blocks = self.num_hidden_layers as u64 * block;
        let num_dense = self.num_dense_layers();
        let mixtures = (self.num_hidden_layers - num_dense) as u64;
        let mixture = self.moe.as_ref();
        let mixture = mixture.map_or(0, |moe| moe.num_parameters(self.hidden_size, num_experts));
        let feed_forward = num_dense as u64 * mlp + mixtures * mixture;
        embedding + blocks + feed_forward + hidden + head
    }

    /// Rejects invalid dimensions.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        self.check_limits()?;
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            let nearest = nearest_divisor(heads, kv_heads);
            return Err(ConfigError::contradiction(
                format!(
                    "model.num_attention_heads = {heads} is not divisible by \
                     model.num_key_value_heads = {kv_heads}"
                ),
                format!("the nearest valid choice is model.num_key_value_heads = {nearest}"),
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            let (odd, even) = (self.head_dim, self.head_dim + 1);
            return Err(ConfigError::contradiction(
                format!("model.head_dim = {odd} is odd, but rotary embedding rotates pairs"),
                format!("the nearest valid choice is model.head_dim = {even}"),
            ));
        }
        within("model.resid_pdrop", self.resid_pdrop, 0.0, 0.99)?;
        check_positive("model.rope_theta", self.rope_theta)?;
        if let Some(scaling) = &self.rope_scaling {
            scaling.check()?;
        }
        check_positive("model.rms_norm_eps", self.rms_norm_eps)
    }

    fn check_limits(&self) -> Result<(), ConfigError> {
        let query_width = self.num_attention_heads.saturating_mul(self.head_dim);
        check_sizes(&[
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
            ("num_attention_heads x head_dim", query_width),
        ])
    }
}

impl RopeScaling {
    fn check(&self) -> Result<(), ConfigError> {
        check_positive("model.rope_scaling.factor", self.factor)?;
        check_positive("model.rope_scaling.low_freq_factor", self.low_freq_factor)?;
        check_positive("model.rope_scaling.high_freq_factor", self.high_freq_factor)?;
        check_sizes(&[(
            "rope_scaling.original_max_position_embeddings",
            self.original_max_position_embeddings,
        )])?;
        if self.low_freq_factor < self.high_freq_factor {
            Ok(())
        } else {
            Err(ConfigError::contradiction(
                format!(
                    "model.rope_scaling.low_freq_factor = {} is not below high_freq_factor = {}",
                    self.low_freq_factor, self.high_freq_factor
                ),
                "Llama 3.1 has 1 and 4",
            ))
        }
    }
}

/// Within these limits no computed size overflows; values beyond them are mistakes.
pub(crate) fn check_sizes(sizes: &[(&str, usize)]) -> Result<(), ConfigError> {
    const WIDTH: usize = 1 << 24;
    const LAYERS: usize = 1 << 12;
    const POSITIONS: usize = 1 << 32;
    for &(key, value) in sizes {
        let limit = match key {
            "num_hidden_layers" => LAYERS,
            "max_position_embeddings" => POSITIONS,
            _ => WIDTH,
        };
        if value == 0 || value > limit {
            return Err(ConfigError::contradiction(
                format!("model.{key} = {value} is out of range"),
                format!("use 1 to {limit}"),
            ));
        }
    }
    Ok(())
}

pub(crate) fn check_positive(key: &str, value: f64) -> Result<(), ConfigError> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(ConfigError::contradiction(
        format!("{key} = {value} must be a positive number"),
        format!("remove {key} to use that of the flavor"),
    ))
}

/// The divisor of `number` nearest to `wanted`; of two equally near, the smaller.
pub(crate) fn nearest_divisor(number: usize, wanted: usize) -> usize {
    let wanted = wanted.min(number);
    (0..=number)
        .flat_map(|distance| [wanted.saturating_sub(distance), wanted + distance])
        .find(|&candidate| candidate > 0 && number.is_multiple_of(candidate))
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn published_sizes() {
        let size = |flavor| LlamaConfig::of(flavor).num_parameters();
        assert_eq!(size(Flavor::Tiny), 1_049_728);
        assert_eq!(size(Flavor::Small), 27_795_968);
        assert_eq!(size(Flavor::Llama3_8b), 8_030_261_248);
        assert_eq!(size(Flavor::Llama3_70b), 70_553_706_496);
        assert_eq!(size(Flavor::Llama3_405b), 405_853_388_800);
    }

    #[test]
    fn active_parameters_count_the_experts_of_a_token() {
        // Mixtral 8x7B: 46.7 billion parameters, of which a token uses 12.9.
        let shape = LlamaConfig {
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 14_336,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 8,
            head_dim: 128,
            moe: Some(MoeConfig::plain(8, 2, 14_336)),
            ..LlamaConfig::of(Flavor::Tiny)
        };
        assert_eq!(shape.num_parameters(), 46_702_792_704);
        assert_eq!(shape.num_active_parameters(), 12_879_925_248);
    }

    #[test]
    fn a_tied_head_has_no_parameters() {
        let mut shape = LlamaConfig::of(Flavor::Small);
        let untied = shape.num_parameters();
        shape.tie_word_embeddings = true;
        assert_eq!(untied - shape.num_parameters(), 4096 * 512);
    }

    proptest! {
        #[test]
        fn the_nearest_divisor_divides(number in 1usize..500, wanted in 0usize..600) {
            let found = nearest_divisor(number, wanted);
            prop_assert_eq!(number % found, 0);
            for other in (1..=number).filter(|d| number % d == 0) {
                prop_assert!(found.abs_diff(wanted) <= other.abs_diff(wanted));
            }
        }
    }
}

//! The shape of a Llama decoder: published ones, what a shape must satisfy, and its size.

use serde::{Deserialize, Serialize};

use crate::section::within;
use crate::{ConfigError, Flavor, MoeConfig};

/// How Llama 3.1 stretches rotations over longer sequences than it was first trained on: slow ones turn
/// `factor` times slower, fast ones as before, and those between in between.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// How many times slower the slowest rotations turn.
    pub factor: f64,
    /// Rotations that turn fewer times than this over the first length are slow.
    pub low_freq_factor: f64,
    /// Those that turn more often than this are fast.
    pub high_freq_factor: f64,
    /// The first length.
    pub original_max_position_embeddings: usize,
}

/// The shape of a Llama decoder, under the names of Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Number of different tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key/value heads.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// How rotations are stretched; not at all if absent.
    pub rope_scaling: Option<RopeScaling>,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether queries, keys and values have a bias, as Qwen 2 has it.
    pub attention_bias: bool,
    /// Whether every head of queries and keys is normed, as Qwen 3 has it.
    pub qk_norm: bool,
    /// Longest sequence the model accepts.
    pub max_position_embeddings: usize,
    /// Share of what is added to the residual stream that training leaves out.
    pub resid_pdrop: f64,
    /// The experts of blocks that have them; none if absent.
    pub moe: Option<MoeConfig>,
}

impl LlamaConfig {
    /// A published or built-in shape.
    pub fn of(flavor: Flavor) -> LlamaConfig {
        // vocabulary, hidden, MLP, layers, heads, key/value heads, theta, longest sequence
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

    /// Width of all query heads together.
    pub fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key heads together, which is that of all value heads.
    pub fn key_value_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Blocks with a dense feed-forward part.
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

    /// The number of those that a token meets, in closed form.
    pub fn num_active_parameters(&self) -> u64 {
        self.with_experts(self.moe.as_ref().map_or(0, |moe| moe.num_experts_per_tok))
    }

    /// The number of parameters where so many experts of a block are counted.
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
        let biases = match self.attention_bias {
            true => (self.query_width() + 2 * self.key_value_width()) as u64,
            false => 0,
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

    /// Refuses shapes that no decoder can have.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        self.check_limits()?;
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            let nearest = nearest_divisor(heads, kv_heads);
            return Err(ConfigError::contradiction(
                format!(
                    "model.num_attention_heads = {heads} cannot be shared evenly by \
                     model.num_key_value_heads = {kv_heads}"
                ),
                format!("the nearest valid choice is model.num_key_value_heads = {nearest}"),
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            let (odd, even) = (self.head_dim, self.head_dim + 1);
            return Err(ConfigError::contradiction(
                format!("model.head_dim = {odd} is odd, but rotary embedding turns pairs"),
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
        match self.low_freq_factor < self.high_freq_factor {
            true => Ok(()),
            false => Err(ConfigError::contradiction(
                format!(
                    "model.rope_scaling.low_freq_factor = {} is not below high_freq_factor = {}",
                    self.low_freq_factor, self.high_freq_factor
                ),
                "Llama 3.1 has 1 and 4",
            )),
        }
    }
}

/// Within these limits no size computed from a shape overflows; beyond them it is a slip.
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
        format!("remove {key} to use the flavor's"),
    ))
}

/// The divisor of `number` nearest to `wanted`, the smaller of two equally near.
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
    fn a_token_meets_some_experts_of_many() {
        // Mixtral 8x7B: 46.7 billion parameters, of which a token meets 12.9.
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
    fn a_tied_head_costs_nothing() {
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

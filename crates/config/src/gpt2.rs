//! The dimensions of a GPT-2 decoder.

use crate::ConfigError;
use crate::llama::{check_positive, check_sizes};
use crate::section::within;

/// The dimensions of a GPT-2 decoder, with the names of newer models.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Hidden size: `n_embd`.
    pub hidden_size: usize,
    /// Width of the MLP: `n_inner`.
    pub intermediate_size: usize,
    /// Number of blocks: `n_layer`.
    pub num_hidden_layers: usize,
    /// Number of heads: `n_head`.
    pub num_attention_heads: usize,
    /// Maximum sequence length, and rows of the position embedding: `n_positions`.
    pub max_position_embeddings: usize,
    /// Added to the variance in LayerNorm.
    pub layer_norm_epsilon: f64,
    /// Whether the output head shares the weights of the embedding.
    pub tie_word_embeddings: bool,
    /// Dropout probability of what is added to the residual stream.
    pub resid_pdrop: f64,
}

impl Default for Gpt2Config {
    /// The smallest published GPT-2.
    fn default() -> Self {
        Gpt2Config {
            vocab_size: 50_257,
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            max_position_embeddings: 1024,
            layer_norm_epsilon: 1e-5,
            tie_word_embeddings: true,
            resid_pdrop: 0.0,
        }
    }
}

impl Gpt2Config {
    /// The number of parameters, in closed form.
    pub fn num_parameters(&self) -> u64 {
        let (hidden, inner) = (self.hidden_size as u64, self.intermediate_size as u64);
        let affine = |from: u64, to: u64| from * to + to;
        let norm = 2 * hidden;
        let attention = affine(hidden, 3 * hidden) + affine(hidden, hidden);
        let mlp = affine(hidden, inner) + affine(inner, hidden);
        let block = 2 * norm + attention + mlp;
        let table = self.vocab_size as u64 * hidden;
        let head = if self.tie_word_embeddings { 0 } else { table };
        let positions = self.max_position_embeddings as u64 * hidden;
        table + positions + self.num_hidden_layers as u64 * block + norm + head
    }

    /// Rejects invalid dimensions.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        check_sizes(&[
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ])?;
        within("model.resid_pdrop", self.resid_pdrop, 0.0, 0.99)?;
        check_positive("model.layer_norm_epsilon", self.layer_norm_epsilon)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_size() {
        assert_eq!(Gpt2Config::default().num_parameters(), 124_439_808);
    }
}

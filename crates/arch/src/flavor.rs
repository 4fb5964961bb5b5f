//! Published and built-in dimensions of Llamas.

use serde::{Deserialize, Serialize};

use crate::DecoderConfig;

/// A published or built-in set of dimensions of a Llama.
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

impl Flavor {
    /// All flavors, the smallest first.
    pub const ALL: [Flavor; 5] = [
        Flavor::Tiny,
        Flavor::Small,
        Flavor::Llama3_8b,
        Flavor::Llama3_70b,
        Flavor::Llama3_405b,
    ];

    /// The name in a config.
    pub const fn name(self) -> &'static str {
        match self {
            Flavor::Tiny => "tiny",
            Flavor::Small => "small",
            Flavor::Llama3_8b => "llama3-8b",
            Flavor::Llama3_70b => "llama3-70b",
            Flavor::Llama3_405b => "llama3-405b",
        }
    }
}

impl From<Flavor> for DecoderConfig {
    fn from(flavor: Flavor) -> DecoderConfig {
        // vocabulary, hidden, MLP, layers, heads, KV heads, theta, maximum sequence length
        let (vocab, hidden, mlp, layers, heads, kv_heads, theta, longest) = match flavor {
            Flavor::Tiny => (1024, 128, 384, 4, 4, 2, 1e4, 2048),
            Flavor::Small => (4096, 512, 1408, 8, 8, 4, 1e4, 2048),
            Flavor::Llama3_8b => (128_256, 4096, 14_336, 32, 32, 8, 5e5, 8192),
            Flavor::Llama3_70b => (128_256, 8192, 28_672, 80, 64, 8, 5e5, 8192),
            Flavor::Llama3_405b => (128_256, 16_384, 53_248, 126, 128, 8, 5e5, 131_072),
        };
        DecoderConfig {
            vocab_size: vocab,
            hidden_size: hidden,
            intermediate_size: mlp,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim: hidden / heads,
            max_position_embeddings: longest,
            rope_theta: theta,
            norm_eps: 1e-5,
            ..DecoderConfig::llama()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_sizes() {
        let sizes = Flavor::ALL.map(|flavor| DecoderConfig::from(flavor).num_parameters());
        let published = [
            1_049_728,
            27_795_968,
            8_030_261_248,
            70_553_706_496,
            405_853_388_800,
        ];
        assert_eq!(sizes, published);
    }
}

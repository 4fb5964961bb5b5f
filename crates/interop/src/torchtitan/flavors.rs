//! The models that torchtitan registers. Its configs name a model and cannot describe others.

use super::super::is_same_model;
use trainyard_arch::{DecoderConfig, MoeConfig, QkNorm};

/// A model that torchtitan registers.
#[derive(Debug)]
pub(super) struct Flavor {
    /// The model family: `model.name`, or `--module`.
    pub module: &'static str,
    /// The name within the family: `model.flavor`.
    pub name: &'static str,
    /// The config function that 0.3.0 takes as `--config`, with its defaults, if the model has one.
    pub config: Option<Registered>,
    /// Vocabulary size, hidden size, feed-forward size, layers, attention heads, KV heads, head dimension.
    sizes: [usize; 7],
    /// Number of experts, experts per token, expert hidden size.
    experts: Option<[usize; 3]>,
    is_tied: bool,
}

/// The defaults of a config function in 0.3.0's registry.
#[derive(Copy, Clone, Debug)]
pub(super) struct Registered {
    pub name: &'static str,
    pub local_batch_size: usize,
    pub seq_len: usize,
    pub tensor_parallel_degree: usize,
    pub schedule: &'static str,
    pub recompute: &'static str,
    /// Whether it uses float8 matrix products, which no flag disables.
    pub is_float8: bool,
}

const fn registered(
    name: &'static str,
    local_batch_size: usize,
    seq_len: usize,
    recompute: &'static str,
) -> Registered {
    Registered {
        name,
        local_batch_size,
        seq_len,
        tensor_parallel_degree: 1,
        schedule: "1F1B",
        recompute,
        is_float8: false,
    }
}

const fn llama(name: &'static str, config: Registered, sizes: [usize; 7]) -> Flavor {
    Flavor {
        module: "llama3",
        name,
        config: Some(config),
        sizes,
        experts: None,
        is_tied: false,
    }
}

const fn qwen(name: &'static str, config: Option<Registered>, sizes: [usize; 7]) -> Flavor {
    Flavor {
        module: "qwen3",
        name,
        config,
        sizes,
        experts: None,
        is_tied: false,
    }
}

/// The models of 0.2.2 and 0.3.0.
pub(super) const FLAVORS: [Flavor; 12] = [
    llama(
        "debugmodel",
        Registered {
            schedule: "Interleaved1F1B",
            ..registered("llama3_debugmodel", 8, 2048, "selective")
        },
        [2048, 256, 768, 6, 16, 16, 16],
    ),
    llama(
        "8B",
        registered("llama3_8b", 1, 8192, "selective"),
        [128_256, 4096, 14_336, 32, 32, 8, 128],
    ),
    llama(
        "70B",
        Registered {
            tensor_parallel_degree: 8,
            ..registered("llama3_70b", 8, 8192, "full")
        },
        [128_256, 8192, 28_672, 80, 64, 8, 128],
    ),
    llama(
        "405B",
        Registered {
            tensor_parallel_degree: 8,
            is_float8: true,
            ..registered("llama3_405b", 2, 8192, "full")
        },
        [128_256, 16_384, 53_248, 126, 128, 8, 128],
    ),
    Flavor {
        is_tied: true,
        ..qwen(
            "0.6B",
            Some(registered("qwen3_0_6b", 4, 4096, "selective")),
            [151_936, 1024, 3072, 28, 16, 8, 128],
        )
    },
    Flavor {
        is_tied: true,
        ..qwen(
            "1.7B",
            Some(registered("qwen3_1_7b", 4, 4096, "selective")),
            [151_936, 2048, 6144, 28, 16, 8, 128],
        )
    },
    Flavor {
        is_tied: true,
        ..qwen("4B", None, [151_936, 2560, 9728, 36, 32, 8, 128])
    },
    qwen("8B", None, [151_936, 4096, 12_288, 36, 32, 8, 128]),
    qwen(
        "14B",
        Some(registered("qwen3_14b", 4, 4096, "full")),
        [151_936, 5120, 17_408, 40, 40, 8, 128],
    ),
    qwen(
        "32B",
        Some(registered("qwen3_32b", 2, 4096, "full")),
        [151_936, 5120, 25_600, 64, 64, 8, 128],
    ),
    Flavor {
        experts: Some([128, 8, 768]),
        ..qwen(
            "30B-A3B",
            Some(registered("qwen3_30b_a3b", 2, 4096, "full")),
            [151_936, 2048, 6144, 48, 32, 4, 128],
        )
    },
    Flavor {
        experts: Some([128, 8, 1536]),
        ..qwen("235B-A22B", None, [151_936, 4096, 12_288, 94, 64, 4, 128])
    },
];

/// Whether torchtitan registers a flavor of this name.
pub(in super::super) fn is_flavor(name: &str) -> bool {
    FLAVORS.iter().any(|flavor| flavor.name == name)
}

impl Flavor {
    /// The model's shape. torchtitan sets the maximum sequence length to that of the data.
    pub fn shape(&self, seq_len: usize) -> DecoderConfig {
        let [vocab, hidden, mlp, layers, heads, kv_heads, head_dim] = self.sizes;
        DecoderConfig {
            name: format!("{} {}", self.module, self.name),
            vocab_size: vocab,
            hidden_size: hidden,
            intermediate_size: mlp,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            tie_word_embeddings: self.is_tied,
            max_position_embeddings: seq_len.max(131_072),
            moe: self
                .experts
                .map(|[number, per_token, width]| MoeConfig::plain(number, per_token, width)),
            qk_norm: (self.module == "qwen3").then_some(QkNorm::Head),
            ..DecoderConfig::from(trainyard_arch::Flavor::Tiny)
        }
    }

    /// The offered flavor with exactly this shape.
    pub fn of(
        shape: &DecoderConfig,
        is_offered: impl Fn(&Flavor) -> bool,
    ) -> Option<&'static Flavor> {
        let mut offered = FLAVORS.iter().filter(|flavor| is_offered(flavor));
        offered.find(|flavor| is_same_model(&flavor.shape(0), shape))
    }

    /// The most similar offered flavor: with experts only if the shape has them, then the closest size.
    pub fn nearest(
        shape: &DecoderConfig,
        is_offered: impl Fn(&Flavor) -> bool,
    ) -> Option<&'static Flavor> {
        let size = |s: &DecoderConfig| s.hidden_size.saturating_mul(s.num_hidden_layers);
        let offered = FLAVORS.iter().filter(|flavor| is_offered(flavor));
        offered.min_by_key(|flavor| {
            let other = flavor.shape(0);
            let differs = other.moe.is_some() != shape.moe.is_some();
            (differs, size(&other).abs_diff(size(shape)))
        })
    }
}

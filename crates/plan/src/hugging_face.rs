//! Reads model shapes from Hugging Face's `config.json`.

use serde::Deserialize;

use crate::{Experts, FeedForward, LatentAttention, Norm, Positions, Shape};

/// Why a `config.json` cannot be used.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ShapeError {
    /// Invalid JSON, or a key of another type.
    #[error("not a config.json: {0}")]
    Syntax(String),
    /// An unsupported model family.
    #[error("model_type {found:?} is not supported: use one of {known}")]
    Family {
        /// The model type.
        found: String,
        /// The supported model types.
        known: String,
    },
    /// A required key is missing.
    #[error("model_type {family:?} needs {key}: add it to config.json")]
    Missing {
        /// The model type.
        family: String,
        /// The missing key.
        key: &'static str,
    },
    /// A value out of range.
    #[error("{key} = {value} is out of range: use 1 to {limit}")]
    Range {
        /// The key.
        key: &'static str,
        /// Its value.
        value: usize,
        /// The largest valid value.
        limit: usize,
    },
    /// A mixture of experts with dense blocks after its first expert block.
    #[error(
        "{what}: only mixtures whose blocks are equal after the leading dense blocks are supported"
    )]
    Uneven {
        /// The keys and values that cause it.
        what: String,
    },
}

/// The supported model families.
const KNOWN: [&str; 10] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
];

/// The keys that determine sizes; models have many more.
#[derive(Default, Deserialize)]
struct ConfigJson {
    model_type: String,
    #[serde(rename = "_name_or_path")]
    name: Option<String>,
    vocab_size: Option<usize>,
    #[serde(alias = "n_embd")]
    hidden_size: Option<usize>,
    #[serde(alias = "n_inner")]
    intermediate_size: Option<usize>,
    #[serde(alias = "n_layer")]
    num_hidden_layers: Option<usize>,
    #[serde(alias = "n_head")]
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    #[serde(alias = "n_positions")]
    max_position_embeddings: Option<usize>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    #[serde(alias = "num_local_experts", alias = "n_routed_experts")]
    num_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    n_shared_experts: Option<usize>,
    shared_expert_intermediate_size: Option<usize>,
    first_k_dense_replace: Option<usize>,
    moe_layer_freq: Option<usize>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
    q_lora_rank: Option<usize>,
    kv_lora_rank: Option<usize>,
    qk_nope_head_dim: Option<usize>,
    qk_rope_head_dim: Option<usize>,
    v_head_dim: Option<usize>,
}

impl Shape {
    /// Parses the shape from the text of a `config.json`.
    pub fn from_hugging_face(text: &str) -> Result<Shape, ShapeError> {
        let found: ConfigJson =
            serde_json::from_str(text).map_err(|e| ShapeError::Syntax(e.to_string()))?;
        if !KNOWN.contains(&found.model_type.as_str()) {
            return Err(ShapeError::Family {
                found: found.model_type,
                known: KNOWN.join(", "),
            });
        }
        found.shape()
    }
}

impl ConfigJson {
    fn shape(&self) -> Result<Shape, ShapeError> {
        let is_gpt2 = self.model_type == "gpt2";
        let hidden_size = self.require(self.hidden_size, "hidden_size")?;
        let num_attention_heads = self.require(self.num_attention_heads, "num_attention_heads")?;
        let latent = self.latent()?;
        let own_head = latent.map(|latent| latent.qk_nope_head_dim + latent.qk_rope_head_dim);
        let head_dim = self.head_dim.filter(|_| latent.is_none()).or(own_head);
        let inner = self
            .intermediate_size
            .or(is_gpt2.then_some(4 * hidden_size));
        let shape = Shape {
            name: self.name.clone().unwrap_or_else(|| self.model_type.clone()),
            vocab_size: self.require(self.vocab_size, "vocab_size")?,
            intermediate_size: self.require(inner, "intermediate_size")?,
            num_hidden_layers: self.require(self.num_hidden_layers, "num_hidden_layers")?,
            num_key_value_heads: self.num_key_value_heads.unwrap_or(num_attention_heads),
            head_dim: head_dim.unwrap_or(hidden_size / num_attention_heads),
            feed_forward: if is_gpt2 {
                FeedForward::Plain
            } else {
                FeedForward::Gated
            },
            norm: if is_gpt2 {
                Norm::Layer
            } else {
                Norm::RootMeanSquare
            },
            positions: if is_gpt2 {
                Positions::Learned
            } else {
                Positions::Rotary
            },
            has_biases: is_gpt2,
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(is_gpt2),
            max_position_embeddings: self.max_position_embeddings.unwrap_or(2048),
            experts: self.experts()?,
            attention_bias: self.model_type.starts_with("qwen2")
                || self.attention_bias.unwrap_or(false),
            qk_norm: self.model_type.starts_with("qwen3"),
            latent,
            hidden_size,
            num_attention_heads,
        };
        check(&shape)?;
        Ok(shape)
    }

    fn require(&self, value: Option<usize>, key: &'static str) -> Result<usize, ShapeError> {
        let value = value.ok_or_else(|| ShapeError::Missing {
            family: self.model_type.clone(),
            key,
        })?;
        within(key, value)
    }

    fn latent(&self) -> Result<Option<LatentAttention>, ShapeError> {
        if !self.model_type.starts_with("deepseek") {
            return Ok(None);
        }
        Ok(Some(LatentAttention {
            q_lora_rank: self
                .q_lora_rank
                .map(|rank| within("q_lora_rank", rank))
                .transpose()?,
            kv_lora_rank: self.require(self.kv_lora_rank, "kv_lora_rank")?,
            qk_nope_head_dim: self.require(self.qk_nope_head_dim, "qk_nope_head_dim")?,
            qk_rope_head_dim: self.require(self.qk_rope_head_dim, "qk_rope_head_dim")?,
            v_head_dim: self.require(self.v_head_dim, "v_head_dim")?,
        }))
    }

    fn experts(&self) -> Result<Option<Experts>, ShapeError> {
        let family = self.model_type.as_str();
        if !matches!(
            family,
            "mixtral" | "qwen2_moe" | "qwen3_moe" | "deepseek_v2" | "deepseek_v3"
        ) {
            return Ok(None);
        }
        self.check_even()?;
        let default_width = self.intermediate_size.filter(|_| family == "mixtral");
        let width = self.moe_intermediate_size.or(default_width);
        let width = self.require(width, "moe_intermediate_size")?;
        let (num_shared_experts, shared_intermediate_size) = match family {
            "qwen2_moe" => (
                1,
                self.require(
                    self.shared_expert_intermediate_size,
                    "shared_expert_intermediate_size",
                )?,
            ),
            _ => (self.n_shared_experts.unwrap_or(0), width),
        };
        let num_experts = self.require(self.num_experts, "num_experts")?;
        let num_experts_per_tok = self.require(self.num_experts_per_tok, "num_experts_per_tok")?;
        if num_experts_per_tok > num_experts {
            return Err(ShapeError::Range {
                key: "num_experts_per_tok",
                value: num_experts_per_tok,
                limit: num_experts,
            });
        }
        Ok(Some(Experts {
            num_experts,
            num_experts_per_tok,
            moe_intermediate_size: width,
            num_shared_experts,
            shared_intermediate_size,
            num_dense_layers: self.first_k_dense_replace.unwrap_or(0),
            has_shared_gate: family == "qwen2_moe",
            has_router_bias: family == "deepseek_v3",
        }))
    }

    fn check_even(&self) -> Result<(), ShapeError> {
        let steps = [
            ("decoder_sparse_step", self.decoder_sparse_step),
            ("moe_layer_freq", self.moe_layer_freq),
        ];
        for (key, step) in steps {
            if let Some(step) = step.filter(|&step| step != 1) {
                let what = format!("{key} = {step}");
                return Err(ShapeError::Uneven { what });
            }
        }
        match &self.mlp_only_layers {
            Some(layers) if !layers.is_empty() => Err(ShapeError::Uneven {
                what: format!("mlp_only_layers has {} entries", layers.len()),
            }),
            _ => Ok(()),
        }
    }
}

/// Within this limit no size computed from a shape overflows; a larger value is a typo.
const LIMIT: usize = 1 << 24;

fn within(key: &'static str, value: usize) -> Result<usize, ShapeError> {
    match value {
        1..=LIMIT => Ok(value),
        _ => Err(ShapeError::Range {
            key,
            value,
            limit: LIMIT,
        }),
    }
}

/// Checks the optional keys and the products of sizes.
fn check(shape: &Shape) -> Result<(), ShapeError> {
    within("num_key_value_heads", shape.num_key_value_heads)?;
    within("head_dim", shape.head_dim)?;
    within("max_position_embeddings", shape.max_position_embeddings)?;
    let layers = shape.num_hidden_layers;
    if layers > 1 << 12 {
        return Err(ShapeError::Range {
            key: "num_hidden_layers",
            value: layers,
            limit: 1 << 12,
        });
    }
    let width = shape.num_attention_heads.saturating_mul(shape.head_dim);
    within("num_attention_heads x head_dim", width)?;
    if let Some(experts) = &shape.experts {
        let limit = 1 << 16;
        if experts.num_experts > limit {
            let (key, value) = ("num_experts", experts.num_experts);
            return Err(ShapeError::Range { key, value, limit });
        }
        let shared = experts.num_shared_experts;
        within(
            "num_shared_experts x shared_intermediate_size",
            shared
                .saturating_mul(experts.shared_intermediate_size)
                .max(1),
        )?;
        let num_dense = experts.num_dense_layers;
        if num_dense > layers {
            let (key, value) = ("first_k_dense_replace", num_dense);
            return Err(ShapeError::Range {
                key,
                value,
                limit: layers,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(text: &str) -> (u64, u64) {
        let shape = Shape::from_hugging_face(text).unwrap();
        (shape.num_parameters(), shape.num_active_parameters())
    }

    #[test]
    fn parameter_counts_match_published_sizes() {
        let llama = |hidden, mlp, layers, heads| {
            format!(
                r#"{{"model_type":"llama","vocab_size":128256,"hidden_size":{hidden},
                "intermediate_size":{mlp},"num_hidden_layers":{layers},
                "num_attention_heads":{heads},"num_key_value_heads":8,"mystery":[1]}}"#
            )
        };
        assert_eq!(size(&llama(4096, 14_336, 32, 32)).0, 8_030_261_248);
        assert_eq!(size(&llama(8192, 28_672, 80, 64)).0, 70_553_706_496);
        assert_eq!(size(&llama(16_384, 53_248, 126, 128)).0, 405_853_388_800);
        let gpt2 = r#"{"model_type":"gpt2","vocab_size":50257,"n_embd":768,"n_layer":12,
            "n_head":12,"n_positions":1024,"n_inner":null}"#;
        assert_eq!(size(gpt2), (124_439_808, 124_439_808));
        let mistral = r#"{"model_type":"mistral","vocab_size":32000,"hidden_size":4096,
            "intermediate_size":14336,"num_hidden_layers":32,"num_attention_heads":32,
            "num_key_value_heads":8}"#;
        assert_eq!(size(mistral).0, 7_241_732_096);
        let qwen2 = r#"{"model_type":"qwen2","vocab_size":152064,"hidden_size":3584,
            "intermediate_size":18944,"num_hidden_layers":28,"num_attention_heads":28,
            "num_key_value_heads":4}"#;
        assert_eq!(size(qwen2).0, 7_615_616_512);
        let qwen3 = r#"{"model_type":"qwen3","vocab_size":151936,"hidden_size":4096,
            "intermediate_size":12288,"num_hidden_layers":36,"num_attention_heads":32,
            "num_key_value_heads":8,"head_dim":128}"#;
        assert_eq!(size(qwen3).0, 8_190_735_360);
    }

    #[test]
    fn parameter_counts_of_mixtures_match_published_sizes() {
        let mixtral = r#"{"model_type":"mixtral","vocab_size":32000,"hidden_size":4096,
            "intermediate_size":14336,"num_hidden_layers":32,"num_attention_heads":32,
            "num_key_value_heads":8,"num_local_experts":8,"num_experts_per_tok":2}"#;
        assert_eq!(size(mixtral), (46_702_792_704, 12_879_925_248));
        let qwen3 = r#"{"model_type":"qwen3_moe","vocab_size":151936,"hidden_size":2048,
            "intermediate_size":6144,"num_hidden_layers":48,"num_attention_heads":32,
            "num_key_value_heads":4,"head_dim":128,"num_experts":128,"num_experts_per_tok":8,
            "moe_intermediate_size":768,"decoder_sparse_step":1,"mlp_only_layers":[]}"#;
        assert_eq!(size(qwen3).0, 30_532_122_624);
        let qwen2 = r#"{"model_type":"qwen2_moe","vocab_size":151936,"hidden_size":2048,
            "intermediate_size":5632,"num_hidden_layers":24,"num_attention_heads":16,
            "num_key_value_heads":16,"num_experts":60,"num_experts_per_tok":4,
            "moe_intermediate_size":1408,"shared_expert_intermediate_size":5632}"#;
        assert_eq!(size(qwen2).0, 14_315_784_192);
        let deepseek = |family, hidden, layers, heads, mlp, moe, experts, shared, top, q, extra| {
            format!(
                r#"{{"model_type":"{family}","vocab_size":{extra},"hidden_size":{hidden},
                "intermediate_size":{mlp},"num_hidden_layers":{layers},
                "num_attention_heads":{heads},"num_key_value_heads":{heads},
                "n_routed_experts":{experts},"n_shared_experts":{shared},
                "num_experts_per_tok":{top},"moe_intermediate_size":{moe},"q_lora_rank":{q},
                "kv_lora_rank":512,"qk_nope_head_dim":128,"qk_rope_head_dim":64,
                "v_head_dim":128,"moe_layer_freq":1,"first_k_dense_replace":{}}}"#,
                if family == "deepseek_v3" { 3 } else { 1 }
            )
        };
        let v3 = deepseek(
            "deepseek_v3",
            7168,
            61,
            128,
            18_432,
            2048,
            256,
            1,
            8,
            "1536",
            129_280,
        );
        let (total, active) = size(&v3);
        assert_eq!(total, 671_026_419_200);
        assert!((active as f64 / 37.55e9 - 1.0).abs() < 0.01, "{active}");
        let lite = deepseek(
            "deepseek_v2",
            2048,
            27,
            16,
            10_944,
            1408,
            64,
            2,
            6,
            "null",
            102_400,
        );
        assert_eq!(size(&lite).0, 15_706_484_224);
    }

    #[test]
    fn llama_shapes_match_the_config_crate() {
        use trainyard_config::{Flavor, LlamaConfig};
        for flavor in [
            Flavor::Tiny,
            Flavor::Small,
            Flavor::Llama3_8b,
            Flavor::Llama3_405b,
        ] {
            let llama = LlamaConfig::of(flavor);
            assert_eq!(Shape::from(&llama).num_parameters(), llama.num_parameters());
        }
    }

    #[test]
    fn unsupported_configs_are_rejected() {
        let rejection = |text: &str| Shape::from_hugging_face(text).unwrap_err().to_string();
        assert!(rejection("{").contains("config.json"));
        assert!(rejection(r#"{"model_type":"bert"}"#).contains("bert"));
        assert!(rejection(r#"{"model_type":"llama"}"#).contains("hidden_size"));
        let huge = r#"{"model_type":"llama","hidden_size":99999999999}"#;
        assert!(rejection(huge).contains("out of range"));
        let no_heads = r#"{"model_type":"llama","hidden_size":8,"num_attention_heads":0}"#;
        assert!(rejection(no_heads).contains("num_attention_heads"));
        let uneven = r#"{"model_type":"qwen3_moe","vocab_size":8,"hidden_size":8,
            "intermediate_size":8,"num_hidden_layers":8,"num_attention_heads":8,
            "num_experts":8,"decoder_sparse_step":2}"#;
        assert!(rejection(uneven).contains("decoder_sparse_step"));
    }
}

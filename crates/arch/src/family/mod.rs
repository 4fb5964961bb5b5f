//! The families of decoders, and Hugging Face's `config.json` of each.
//!
//! A family is how its file is read and written, and nothing else: whether a decoder can be written as one of a family
//! follows, because what was written and read again must be the same decoder.

mod deepseek;
mod gemma3;
mod gpt2;
mod keys;
mod llama;
mod mixtral;
mod olmo2;
mod olmo3;
mod phi3;
mod qwen;
mod rope_keys;
mod window_keys;

use serde_json::{Map, Value, json};

use crate::{ArchError, BIAS_UPDATE_RATE, DecoderConfig};
use keys::Keys;

/// The `config.json` of a family.
struct Family {
    model_type: &'static str,
    /// The class of the Python library.
    architecture: &'static str,
    read: fn(&Keys) -> Result<DecoderConfig, ArchError>,
    /// The keys of a decoder, as far as the family has them.
    write: fn(&DecoderConfig) -> Map<String, Value>,
}

/// All families; of two that can describe a decoder, the first is written.
const FAMILIES: [Family; 14] = [
    llama::LLAMA,
    qwen::QWEN2,
    qwen::QWEN3,
    mixtral::MIXTRAL,
    qwen::QWEN3_MOE,
    gpt2::GPT2,
    llama::MISTRAL,
    qwen::QWEN2_MOE,
    deepseek::DEEPSEEK_V2,
    deepseek::DEEPSEEK_V3,
    gemma3::GEMMA3,
    olmo2::OLMO2,
    olmo3::OLMO3,
    phi3::PHI3,
];

impl DecoderConfig {
    /// The decoder that a `config.json` describes. Dropout probabilities and coefficients of losses are ignored: they
    /// belong to the training and not to the model.
    pub fn from_hugging_face(text: &str) -> Result<DecoderConfig, ArchError> {
        let keys = Keys::parse(text)?;
        let family = FAMILIES.iter().find(|f| f.model_type == keys.family());
        let family = family.ok_or_else(|| ArchError::Family {
            found: keys.family().to_owned(),
            known: FAMILIES.map(|family| family.model_type).join(", "),
        })?;
        let decoder = (family.read)(&keys)?;
        decoder.check()?;
        let name = keys.text("_name_or_path")?.unwrap_or(family.model_type);
        Ok(DecoderConfig {
            name: name.to_owned(),
            ..decoder
        })
    }

    /// The `config.json` of this decoder; `None` if no family has such a one.
    pub fn to_hugging_face(&self) -> Option<Value> {
        let wanted = self.of_model_only();
        FAMILIES.iter().find_map(|family| {
            let mut map = (family.write)(self);
            map.insert("model_type".to_owned(), json!(family.model_type));
            map.insert("architectures".to_owned(), json!([family.architecture]));
            let read = (family.read)(&Keys::new(map.clone()).ok()?).ok()?;
            (read.of_model_only() == wanted).then_some(Value::Object(map))
        })
    }

    /// Without what belongs to reports and to the training.
    fn of_model_only(&self) -> DecoderConfig {
        let mut decoder = DecoderConfig {
            name: String::new(),
            resid_pdrop: 0.0,
            ..self.clone()
        };
        if let Some(window) = &mut decoder.sliding_window {
            let num_layers = decoder.num_hidden_layers;
            let every = window.full_attention_every;
            window.full_attention_every = every.filter(|every| *every <= num_layers);
        }
        if let Some(moe) = &mut decoder.moe {
            moe.router_aux_loss_coef = 0.0;
            moe.router_z_loss_coef = 0.0;
            moe.bias_update_rate = moe.bias_update_rate.map(|_| BIAS_UPDATE_RATE);
        }
        decoder
    }
}

/// The keys of an object.
fn map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Activation, Flavor, MoeConfig, Norm, NormPlacement, QkNorm, RopeScaling, SlidingWindow,
    };

    fn size(text: &str) -> (u64, u64) {
        let decoder = DecoderConfig::from_hugging_face(text).unwrap();
        (decoder.num_parameters(), decoder.num_active_parameters())
    }

    fn rejection(text: &str) -> String {
        DecoderConfig::from_hugging_face(text)
            .unwrap_err()
            .to_string()
    }

    fn gemma() -> DecoderConfig {
        DecoderConfig {
            tie_word_embeddings: true,
            rope_theta: 1e6,
            rope_scaling: Some(RopeScaling::Linear { factor: 8.0 }),
            norm: Norm::RootMeanSquarePlusOne,
            norm_placement: NormPlacement::BeforeAndAfter,
            hidden_act: Activation::GeluTanh,
            qk_norm: Some(QkNorm::Head),
            query_pre_attn_scalar: Some(168.0),
            sliding_window: Some(SlidingWindow {
                sliding_window: 1024,
                full_attention_every: Some(6),
                rope_local_base_freq: Some(1e4),
            }),
            scales_embedding: true,
            ..DecoderConfig::from(Flavor::Llama3_8b)
        }
    }

    #[test]
    fn a_written_config_json_is_read_back() {
        let llama = || DecoderConfig::from(Flavor::Llama3_8b);
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let qwen_moe = MoeConfig {
            norm_topk_prob: false,
            first_k_dense_replace: 2,
            ..MoeConfig::plain(128, 8, 768)
        };
        for (family, decoder) in [
            ("llama", llama()),
            (
                "llama",
                DecoderConfig {
                    rope_scaling: Some(scaling),
                    ..llama()
                },
            ),
            (
                "qwen2",
                DecoderConfig {
                    attention_bias: true,
                    ..llama()
                },
            ),
            (
                "qwen3",
                DecoderConfig {
                    qk_norm: Some(QkNorm::Head),
                    ..llama()
                },
            ),
            (
                "mixtral",
                DecoderConfig {
                    moe: Some(MoeConfig::plain(8, 2, 14_336)),
                    ..llama()
                },
            ),
            (
                "qwen3_moe",
                DecoderConfig {
                    qk_norm: Some(QkNorm::Head),
                    moe: Some(qwen_moe),
                    ..llama()
                },
            ),
            ("gpt2", DecoderConfig::gpt2()),
            ("gemma3_text", gemma()),
            (
                "olmo2",
                DecoderConfig {
                    norm_placement: NormPlacement::After,
                    qk_norm: Some(QkNorm::AllHeads),
                    ..llama()
                },
            ),
            (
                "phi3",
                DecoderConfig {
                    has_fused_projections: true,
                    ..llama()
                },
            ),
        ] {
            let written = decoder.to_hugging_face().unwrap();
            assert_eq!(written["model_type"], family);
            let read = DecoderConfig::from_hugging_face(&written.to_string()).unwrap();
            assert_eq!(
                read,
                DecoderConfig {
                    name: family.to_owned(),
                    ..decoder
                }
            );
        }
        let unknown = DecoderConfig {
            scales_embedding: true,
            ..llama()
        };
        assert_eq!(unknown.to_hugging_face(), None);
    }

    #[test]
    fn unsupported_options_are_rejected() {
        let with = |key: &str, value: Value| {
            let mut config = DecoderConfig::from(Flavor::Tiny).to_hugging_face().unwrap();
            config[key] = value;
            rejection(&config.to_string())
        };
        assert!(rejection("{").contains("config.json"));
        assert!(with("model_type", json!("bert")).contains("bert"));
        assert!(with("mlp_bias", json!(true)).contains("mlp_bias"));
        assert!(with("hidden_act", json!("gelu")).contains("gelu"));
        let llama3 = json!({ "rope_type": "llama3", "factor": 8.0 });
        assert!(with("rope_scaling", llama3).contains("low_freq_factor"));
        assert!(with("hidden_size", Value::Null).contains("hidden_size"));
        assert!(with("hidden_size", json!("wide")).contains("whole number"));
        assert!(with("hidden_size", json!(99_999_999_999_u64)).contains("out of range"));
        assert!(with("num_attention_heads", json!(0)).contains("num_attention_heads"));
    }

    #[test]
    fn parameter_counts_match_published_sizes() {
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
        let mixtral = r#"{"model_type":"mixtral","vocab_size":32000,"hidden_size":4096,
            "intermediate_size":14336,"num_hidden_layers":32,"num_attention_heads":32,
            "num_key_value_heads":8,"num_local_experts":8,"num_experts_per_tok":2}"#;
        assert_eq!(size(mixtral), (46_702_792_704, 12_879_925_248));
        let qwen3_moe = r#"{"model_type":"qwen3_moe","vocab_size":151936,"hidden_size":2048,
            "intermediate_size":6144,"num_hidden_layers":48,"num_attention_heads":32,
            "num_key_value_heads":4,"head_dim":128,"num_experts":128,"num_experts_per_tok":8,
            "moe_intermediate_size":768,"decoder_sparse_step":1,"mlp_only_layers":[]}"#;
        assert_eq!(size(qwen3_moe).0, 30_532_122_624);
        let qwen2_moe = r#"{"model_type":"qwen2_moe","vocab_size":151936,"hidden_size":2048,
            "intermediate_size":5632,"num_hidden_layers":24,"num_attention_heads":16,
            "num_key_value_heads":16,"num_experts":60,"num_experts_per_tok":4,
            "moe_intermediate_size":1408,"shared_expert_intermediate_size":5632}"#;
        assert_eq!(size(qwen2_moe).0, 14_315_784_192);
    }

    #[test]
    fn blocks_with_windows_of_an_olmo_3_rotate_by_the_same_base() {
        let file = r#"{"model_type":"olmo3","vocab_size":100,"hidden_size":64,
            "intermediate_size":96,"num_hidden_layers":4,"num_attention_heads":4,
            "rope_theta":500000,"rope_scaling":{"rope_type":"yarn","factor":8.0,
            "original_max_position_embeddings":8192,"attention_factor":1.2}}"#;
        let decoder = DecoderConfig::from_hugging_face(file).unwrap();
        let window = decoder.sliding_window.unwrap();
        assert_eq!(window.rope_local_base_freq, Some(decoder.rope_theta));
        assert_eq!(window.full_attention_every, Some(4));
        let few = file.replace("\"num_hidden_layers\":4", "\"num_hidden_layers\":3");
        let few = DecoderConfig::from_hugging_face(&few).unwrap();
        assert!(few.to_hugging_face().is_some());
        let unknown = file.replace(
            "\"rope_theta\"",
            "\"layer_types\":[\"chunked_attention\",\"full_attention\"],\"rope_theta\"",
        );
        assert!(rejection(&unknown).contains("layer_types"));
    }

    #[test]
    fn parameter_counts_of_latent_attention_match_published_sizes() {
        let v3 = r#"{"model_type":"deepseek_v3","vocab_size":129280,"hidden_size":7168,
            "intermediate_size":18432,"num_hidden_layers":61,"num_attention_heads":128,
            "n_routed_experts":256,"n_shared_experts":1,"num_experts_per_tok":8,
            "moe_intermediate_size":2048,"q_lora_rank":1536,"kv_lora_rank":512,
            "qk_nope_head_dim":128,"qk_rope_head_dim":64,"v_head_dim":128,
            "moe_layer_freq":1,"first_k_dense_replace":3}"#;
        let (total, active) = size(v3);
        // The file has 256 biases of the router in each of 58 blocks, which are no parameters.
        assert_eq!(total + 58 * 256, 671_026_419_200);
        assert!((active as f64 / 37.55e9 - 1.0).abs() < 0.01, "{active}");
        let lite = r#"{"model_type":"deepseek_v2","vocab_size":102400,"hidden_size":2048,
            "intermediate_size":10944,"num_hidden_layers":27,"num_attention_heads":16,
            "n_routed_experts":64,"n_shared_experts":2,"num_experts_per_tok":6,
            "moe_intermediate_size":1408,"q_lora_rank":null,"kv_lora_rank":512,
            "qk_nope_head_dim":128,"qk_rope_head_dim":64,"v_head_dim":128,
            "moe_layer_freq":1,"first_k_dense_replace":1}"#;
        assert_eq!(size(lite).0, 15_706_484_224);
    }
}

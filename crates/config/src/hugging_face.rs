//! Hugging Face's `config.json`, read and written.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Gpt2Config, LlamaConfig, ModelSpec, MoeConfig, RopeScaling, ScoringFunc};

/// The keys of a `config.json` that matter here; models have many more.
#[derive(Deserialize)]
struct ConfigJson {
    model_type: String,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rope_theta: Option<f64>,
    rope_parameters: Option<Rope>,
    rope_scaling: Option<Rope>,
    rms_norm_eps: Option<f64>,
    #[serde(default)]
    tie_word_embeddings: bool,
    max_position_embeddings: Option<usize>,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    sliding_window: Option<usize>,
    /// Mixtral's name of `num_experts`.
    num_local_experts: Option<usize>,
    num_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    router_jitter_noise: Option<f64>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
}

/// The rotary embedding.
#[derive(Deserialize)]
struct Rope {
    rope_type: Option<String>,
    /// The name in older files.
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
}

impl Rope {
    /// The rotary type.
    fn kind(&self) -> &str {
        let name = self.rope_type.as_deref().or(self.old_type.as_deref());
        name.unwrap_or("default")
    }

    /// The rotary scaling, or why it is not supported.
    fn scaling(&self) -> Result<Option<RopeScaling>, String> {
        match self.kind() {
            "default" => Ok(None),
            "llama3" => {
                let need = |value: Option<f64>, key: &str| {
                    value.ok_or_else(|| format!("its rope_scaling has no {key}"))
                };
                Ok(Some(RopeScaling {
                    factor: need(self.factor, "factor")?,
                    low_freq_factor: need(self.low_freq_factor, "low_freq_factor")?,
                    high_freq_factor: need(self.high_freq_factor, "high_freq_factor")?,
                    original_max_position_embeddings: self
                        .original_max_position_embeddings
                        .ok_or("its rope_scaling has no original_max_position_embeddings")?,
                }))
            }
            other => Err(format!(
                "rope_type {other:?} is not built: only \"default\" and \"llama3\" are"
            )),
        }
    }
}

/// The model family of a `config.json`.
#[derive(Deserialize)]
struct Family {
    model_type: String,
}

/// The keys of a GPT-2 `config.json`, which has older names.
#[derive(Deserialize)]
struct Gpt2Json {
    vocab_size: usize,
    n_embd: usize,
    n_inner: Option<usize>,
    n_layer: usize,
    n_head: usize,
    n_positions: usize,
    layer_norm_epsilon: Option<f64>,
    activation_function: Option<String>,
    tie_word_embeddings: Option<bool>,
    #[serde(default)]
    scale_attn_by_inverse_layer_idx: bool,
    scale_attn_weights: Option<bool>,
    #[serde(default)]
    add_cross_attention: bool,
}

impl ModelSpec {
    /// The model of a `config.json`, or why it is not supported. Dropout probabilities are ignored: they belong to the
    /// training and not to the model.
    pub fn from_hugging_face(text: &str) -> Result<ModelSpec, String> {
        let family: Family = serde_json::from_str(text).map_err(|e| e.to_string())?;
        match family.model_type.as_str() {
            "gpt2" => Gpt2Config::from_hugging_face(text).map(ModelSpec::Gpt2),
            _ => LlamaConfig::from_hugging_face(text).map(ModelSpec::Llama),
        }
    }

    /// The `config.json` of this model; `None` if Hugging Face has no such model.
    pub fn to_hugging_face(&self) -> Option<Value> {
        match self {
            ModelSpec::Llama(shape) => shape.has_known_experts().then(|| shape.to_hugging_face()),
            ModelSpec::Gpt2(shape) => Some(shape.to_hugging_face()),
            ModelSpec::Cnn => None,
        }
    }
}

impl Gpt2Config {
    fn from_hugging_face(text: &str) -> Result<Gpt2Config, String> {
        let found: Gpt2Json = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let refusals = [
            (
                found.scale_attn_by_inverse_layer_idx,
                "scale_attn_by_inverse_layer_idx = true",
            ),
            (
                found.scale_attn_weights == Some(false),
                "scale_attn_weights = false",
            ),
            (found.add_cross_attention, "add_cross_attention = true"),
        ];
        if let Some((_, what)) = refusals.into_iter().find(|(is_set, _)| *is_set) {
            return Err(format!("{what} is not built"));
        }
        let function = found.activation_function.as_deref();
        if !matches!(function, None | Some("gelu_new" | "gelu_pytorch_tanh")) {
            return Err(format!(
                "activation_function {function:?} is not built: only \"gelu_new\" is"
            ));
        }
        Ok(Gpt2Config {
            vocab_size: found.vocab_size,
            hidden_size: found.n_embd,
            intermediate_size: found.n_inner.unwrap_or(found.n_embd.saturating_mul(4)),
            num_hidden_layers: found.n_layer,
            num_attention_heads: found.n_head,
            max_position_embeddings: found.n_positions,
            layer_norm_epsilon: found.layer_norm_epsilon.unwrap_or(1e-5),
            tie_word_embeddings: found.tie_word_embeddings.unwrap_or(true),
            resid_pdrop: 0.0,
        })
    }

    fn to_hugging_face(&self) -> Value {
        json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocab_size,
            "n_embd": self.hidden_size,
            "n_inner": self.intermediate_size,
            "n_layer": self.num_hidden_layers,
            "n_head": self.num_attention_heads,
            "n_positions": self.max_position_embeddings,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "tie_word_embeddings": self.tie_word_embeddings,
            "activation_function": "gelu_new",
        })
    }
}

impl LlamaConfig {
    /// The dimensions in a `config.json`, or why they are not supported.
    fn from_hugging_face(text: &str) -> Result<LlamaConfig, String> {
        let found: ConfigJson = serde_json::from_str(text).map_err(|e| e.to_string())?;
        found.check()?;
        let missing = |key: &str| format!("it has no {key}");
        let need = |value: Option<usize>, key: &str| value.ok_or_else(|| missing(key));
        let hidden_size = need(found.hidden_size, "hidden_size")?;
        let num_attention_heads = need(found.num_attention_heads, "num_attention_heads")?;
        let theta = found
            .rope_parameters
            .as_ref()
            .and_then(|rope| rope.rope_theta);
        Ok(LlamaConfig {
            vocab_size: need(found.vocab_size, "vocab_size")?,
            intermediate_size: need(found.intermediate_size, "intermediate_size")?,
            num_hidden_layers: need(found.num_hidden_layers, "num_hidden_layers")?,
            num_key_value_heads: found.num_key_value_heads.unwrap_or(num_attention_heads),
            head_dim: match found.head_dim {
                Some(head_dim) => head_dim,
                None => hidden_size
                    .checked_div(num_attention_heads)
                    .ok_or("it has no heads")?,
            },
            rope_theta: found.rope_theta.or(theta).unwrap_or(1e4),
            rope_scaling: found.scaling()?,
            rms_norm_eps: found.rms_norm_eps.unwrap_or(1e-6),
            tie_word_embeddings: found.tie_word_embeddings,
            attention_bias: found.model_type == "qwen2",
            qk_norm: ["qwen3", "qwen3_moe"].contains(&found.model_type.as_str()),
            moe: found.experts()?,
            max_position_embeddings: found.max_position_embeddings.unwrap_or(2048),
            resid_pdrop: 0.0,
            hidden_size,
            num_attention_heads,
        })
    }

    fn to_hugging_face(&self) -> Value {
        let (architecture, model_type) = match (self.attention_bias, self.qk_norm, &self.moe) {
            (false, false, Some(_)) => ("MixtralForCausalLM", "mixtral"),
            (_, _, Some(_)) => ("Qwen3MoeForCausalLM", "qwen3_moe"),
            (true, _, None) => ("Qwen2ForCausalLM", "qwen2"),
            (_, true, None) => ("Qwen3ForCausalLM", "qwen3"),
            _ => ("LlamaForCausalLM", "llama"),
        };
        let rope_scaling = self.rope_scaling.map(|scaling| {
            json!({
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            })
        });
        let mut config = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "rope_scaling": rope_scaling,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
        });
        if let Some(moe) = &self.moe {
            config["num_experts_per_tok"] = json!(moe.num_experts_per_tok);
            match model_type {
                "mixtral" => {
                    config["num_local_experts"] = json!(moe.num_experts);
                    config["intermediate_size"] = json!(moe.moe_intermediate_size);
                    config["sliding_window"] = Value::Null;
                }
                _ => {
                    config["num_experts"] = json!(moe.num_experts);
                    config["moe_intermediate_size"] = json!(moe.moe_intermediate_size);
                    config["norm_topk_prob"] = json!(moe.norm_topk_prob);
                    config["decoder_sparse_step"] = json!(1);
                    let dense: Vec<usize> = (0..self.num_dense_layers()).collect();
                    config["mlp_only_layers"] = json!(dense);
                }
            }
        }
        config
    }

    /// Whether Hugging Face has a model with such experts.
    fn has_known_experts(&self) -> bool {
        let Some(moe) = &self.moe else {
            return true;
        };
        let is_plain = moe.scoring_func == ScoringFunc::Softmax
            && moe.n_shared_experts == 0
            && moe.routed_scaling_factor == 1.0
            && moe.bias_update_rate.is_none()
            && moe.capacity_factor.is_none();
        let is_mixtral = !self.qk_norm && moe.norm_topk_prob && moe.first_k_dense_replace == 0;
        is_plain && !self.attention_bias && (self.qk_norm || is_mixtral)
    }
}

impl ConfigJson {
    /// The mixture of experts. Loss coefficients are ignored: they belong to the training, and Hugging Face's are those of
    /// another loss.
    fn experts(&self) -> Result<Option<MoeConfig>, String> {
        let need = |value: Option<usize>, key: &str| value.ok_or(format!("it has no {key}"));
        let chosen = || need(self.num_experts_per_tok, "num_experts_per_tok");
        match self.model_type.as_str() {
            "mixtral" => Ok(Some(MoeConfig::plain(
                need(self.num_local_experts, "num_local_experts")?,
                chosen()?,
                need(self.intermediate_size, "intermediate_size")?,
            ))),
            "qwen3_moe" => {
                let dense = self.mlp_only_layers.clone().unwrap_or_default();
                if dense
                    .iter()
                    .enumerate()
                    .any(|(index, &layer)| index != layer)
                {
                    return Err(format!("mlp_only_layers {dense:?} are not the first ones"));
                }
                let number = need(self.num_experts.or(self.num_local_experts), "num_experts")?;
                let width = need(self.moe_intermediate_size, "moe_intermediate_size")?;
                Ok(Some(MoeConfig {
                    norm_topk_prob: self.norm_topk_prob.unwrap_or(false),
                    first_k_dense_replace: dense.len(),
                    ..MoeConfig::plain(number, chosen()?, width)
                }))
            }
            _ => Ok(None),
        }
    }

    /// The rotary scaling; newer files have it next to the base.
    fn scaling(&self) -> Result<Option<RopeScaling>, String> {
        let found = [&self.rope_parameters, &self.rope_scaling].into_iter();
        let found = found.flatten().map(Rope::scaling);
        Ok(found
            .collect::<Result<Vec<_>, _>>()?
            .into_iter()
            .flatten()
            .next())
    }

    /// Rejects options that are not implemented.
    fn check(&self) -> Result<(), String> {
        let known = ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt2"];
        if !known.contains(&self.model_type.as_str()) {
            let known = known.join(", ");
            return Err(format!(
                "model_type {:?} is none of {known}",
                self.model_type
            ));
        }
        let refusals = [
            (self.attention_bias, "attention_bias"),
            (self.mlp_bias, "mlp_bias"),
            (self.use_sliding_window, "use_sliding_window"),
        ];
        if let Some((_, key)) = refusals.into_iter().find(|(is_set, _)| *is_set) {
            return Err(format!("{key} = true is not built"));
        }
        if let (Some(window), "mixtral") = (self.sliding_window, self.model_type.as_str()) {
            return Err(format!("sliding_window = {window} is not built"));
        }
        if let Some(noise) = self.router_jitter_noise.filter(|&noise| noise != 0.0) {
            return Err(format!("router_jitter_noise = {noise} is not built"));
        }
        if let Some(step) = self.decoder_sparse_step.filter(|&step| step != 1) {
            return Err(format!("decoder_sparse_step = {step} is not built"));
        }
        match self.hidden_act.as_deref() {
            None | Some("silu") => Ok(()),
            Some(other) => Err(format!(
                "hidden_act {other:?} is not built: only \"silu\" is"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Flavor;

    #[test]
    fn a_written_config_json_is_read_back() {
        for (attention_bias, qk_norm) in [(false, false), (true, false), (false, true)] {
            let shape = LlamaConfig {
                attention_bias,
                qk_norm,
                ..LlamaConfig::of(Flavor::Llama3_8b)
            };
            let text = shape.to_hugging_face().to_string();
            let found = ModelSpec::from_hugging_face(&text);
            assert_eq!(found, Ok(ModelSpec::Llama(shape)));
        }
        let mixtral = LlamaConfig {
            moe: Some(MoeConfig::plain(8, 2, 14_336)),
            ..LlamaConfig::of(Flavor::Llama3_8b)
        };
        let qwen = LlamaConfig {
            qk_norm: true,
            moe: Some(MoeConfig {
                norm_topk_prob: false,
                first_k_dense_replace: 2,
                ..MoeConfig::plain(128, 8, 768)
            }),
            ..LlamaConfig::of(Flavor::Llama3_8b)
        };
        for shape in [mixtral, qwen] {
            let spec = ModelSpec::Llama(shape);
            let text = spec.to_hugging_face().unwrap().to_string();
            assert_eq!(ModelSpec::from_hugging_face(&text), Ok(spec));
        }
        let shape = LlamaConfig {
            rope_scaling: Some(RopeScaling {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            }),
            ..LlamaConfig::of(Flavor::Llama3_8b)
        };
        let text = shape.to_hugging_face().to_string();
        let found = ModelSpec::from_hugging_face(&text);
        assert_eq!(found, Ok(ModelSpec::Llama(shape)));
        let shape = Gpt2Config::default();
        let text = shape.to_hugging_face().to_string();
        let found = ModelSpec::from_hugging_face(&text);
        assert_eq!(found, Ok(ModelSpec::Gpt2(shape)));
    }

    #[test]
    fn unsupported_options_are_rejected() {
        let rejection = |key: &str, value: Value| {
            let mut config = LlamaConfig::of(Flavor::Tiny).to_hugging_face();
            config[key] = value;
            LlamaConfig::from_hugging_face(&config.to_string()).unwrap_err()
        };
        assert!(rejection("model_type", json!("bert")).contains("bert"));
        assert!(rejection("mlp_bias", json!(true)).contains("mlp_bias"));
        assert!(rejection("hidden_act", json!("gelu")).contains("gelu"));
        let llama3 = json!({ "rope_type": "llama3", "factor": 8.0 });
        assert!(rejection("rope_scaling", llama3).contains("low_freq_factor"));
        let yarn = json!({ "rope_type": "yarn", "factor": 8.0 });
        assert!(rejection("rope_scaling", yarn).contains("yarn"));
        let linear = json!({ "type": "linear", "factor": 4.0 });
        assert!(rejection("rope_scaling", linear).contains("linear"));
        assert!(rejection("hidden_size", Value::Null).contains("hidden_size"));
    }
}

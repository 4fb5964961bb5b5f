//! Shapes of models as Hugging Face writes them, in `config.json`.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::LlamaConfig;

/// What is read of a `config.json`; models have many more keys, which change nothing here.
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
}

/// How positions are turned.
#[derive(Deserialize)]
struct Rope {
    rope_type: Option<String>,
    /// What older files call it.
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f64>,
}

impl LlamaConfig {
    /// The shape a `config.json` describes, or why there is none.
    pub fn from_hugging_face(text: &str) -> Result<LlamaConfig, String> {
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
            rms_norm_eps: found.rms_norm_eps.unwrap_or(1e-6),
            tie_word_embeddings: found.tie_word_embeddings,
            attention_bias: found.model_type == "qwen2",
            qk_norm: found.model_type == "qwen3",
            max_position_embeddings: found.max_position_embeddings.unwrap_or(2048),
            resid_pdrop: 0.0,
            hidden_size,
            num_attention_heads,
        })
    }

    /// A `config.json` that describes this shape.
    pub fn to_hugging_face(&self) -> Value {
        let (architecture, model_type) = match (self.attention_bias, self.qk_norm) {
            (true, _) => ("Qwen2ForCausalLM", "qwen2"),
            (_, true) => ("Qwen3ForCausalLM", "qwen3"),
            _ => ("LlamaForCausalLM", "llama"),
        };
        json!({
            "architectures": [architecture],
            "model_type": model_type,
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
        })
    }
}

impl ConfigJson {
    /// Refuses what would be computed otherwise here.
    fn check(&self) -> Result<(), String> {
        let known = ["llama", "qwen2", "qwen3"];
        if !known.contains(&self.model_type.as_str()) {
            let known = known.join(", ");
            return Err(format!(
                "model_type {:?} is none of {known}",
                self.model_type
            ));
        }
        for rope in [&self.rope_parameters, &self.rope_scaling]
            .into_iter()
            .flatten()
        {
            let names = [&rope.rope_type, &rope.old_type].into_iter().flatten();
            if let Some(other) = names.into_iter().find(|name| *name != "default") {
                return Err(format!(
                    "rope_type {other:?} is not built: only \"default\" is"
                ));
            }
        }
        let refusals = [
            (self.attention_bias, "attention_bias"),
            (self.mlp_bias, "mlp_bias"),
            (self.use_sliding_window, "use_sliding_window"),
        ];
        if let Some((_, key)) = refusals.into_iter().find(|(is_set, _)| *is_set) {
            return Err(format!("{key} = true is not built"));
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
    fn what_is_written_is_read() {
        for (attention_bias, qk_norm) in [(false, false), (true, false), (false, true)] {
            let shape = LlamaConfig {
                attention_bias,
                qk_norm,
                ..LlamaConfig::of(Flavor::Llama3_8b)
            };
            let text = shape.to_hugging_face().to_string();
            assert_eq!(LlamaConfig::from_hugging_face(&text), Ok(shape));
        }
    }

    #[test]
    fn what_would_be_computed_otherwise_is_refused() {
        let refusal = |key: &str, value: Value| {
            let mut config = LlamaConfig::of(Flavor::Tiny).to_hugging_face();
            config[key] = value;
            LlamaConfig::from_hugging_face(&config.to_string()).unwrap_err()
        };
        assert!(refusal("model_type", json!("gpt2")).contains("gpt2"));
        assert!(refusal("mlp_bias", json!(true)).contains("mlp_bias"));
        assert!(refusal("hidden_act", json!("gelu")).contains("gelu"));
        let llama3 = json!({ "rope_type": "llama3", "factor": 8.0 });
        assert!(refusal("rope_scaling", llama3).contains("llama3"));
        let linear = json!({ "type": "linear", "factor": 4.0 });
        assert!(refusal("rope_scaling", linear).contains("linear"));
        assert!(refusal("hidden_size", Value::Null).contains("hidden_size"));
    }
}

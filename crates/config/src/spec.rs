//! From the keys of `[model]` to one complete model.

use crate::llama::nearest_divisor;
use crate::{ConfigError, LlamaConfig, ModelName, ModelSection};

/// A model with nothing left open.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSpec {
    /// A Llama decoder of this shape.
    Llama(LlamaConfig),
    /// The CNN, which has one shape only.
    Cnn,
}

impl ModelSpec {
    /// The number of parameters, in closed form.
    pub fn num_parameters(&self) -> u64 {
        match self {
            ModelSpec::Llama(shape) => shape.num_parameters(),
            ModelSpec::Cnn => {
                let conv = |from: u64, to: u64| 3 * 3 * from * to + to;
                let linear = |from: u64, to: u64| from * to + to;
                conv(1, 32) + conv(32, 64) + linear(64 * 28 * 28, 128) + linear(128, 10)
            }
        }
    }
}

impl ModelSection {
    /// The model these keys describe.
    pub fn resolve(&self) -> Result<ModelSpec, ConfigError> {
        match self.name {
            ModelName::Llama => self.llama().map(ModelSpec::Llama),
            ModelName::Cnn => self.cnn(),
        }
    }

    fn llama(&self) -> Result<LlamaConfig, ConfigError> {
        let base = self.base()?;
        let hidden_size = self.hidden_size.unwrap_or(base.hidden_size);
        let num_attention_heads = self.num_attention_heads.unwrap_or(base.num_attention_heads);
        let is_reshaped = self.hidden_size.is_some() || self.num_attention_heads.is_some();
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None if !is_reshaped => base.head_dim,
            None => divide(hidden_size, num_attention_heads)?,
        };
        let or = |given: Option<usize>, base| given.unwrap_or(base);
        let shape = LlamaConfig {
            vocab_size: or(self.vocab_size, base.vocab_size),
            hidden_size,
            intermediate_size: or(self.intermediate_size, base.intermediate_size),
            num_hidden_layers: or(self.num_hidden_layers, base.num_hidden_layers),
            num_attention_heads,
            num_key_value_heads: or(self.num_key_value_heads, base.num_key_value_heads),
            head_dim,
            rope_theta: self.rope_theta.unwrap_or(base.rope_theta),
            rms_norm_eps: self.rms_norm_eps.unwrap_or(base.rms_norm_eps),
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(base.tie_word_embeddings),
            attention_bias: self.attention_bias.unwrap_or(base.attention_bias),
            qk_norm: self.qk_norm.unwrap_or(base.qk_norm),
            max_position_embeddings: or(self.max_position_embeddings, base.max_position_embeddings),
            resid_pdrop: self.resid_pdrop.unwrap_or(base.resid_pdrop),
        };
        shape.check()?;
        Ok(shape)
    }

    /// The shape to start from: that of a folder of Hugging Face's, or a flavor's.
    fn base(&self) -> Result<LlamaConfig, ConfigError> {
        let Some(folder) = &self.hf_assets_path else {
            return Ok(LlamaConfig::of(self.flavor.unwrap_or_default()));
        };
        let path = folder.join("config.json");
        let refused = |reason: String| {
            let what = format!("model.hf_assets_path: {}: {reason}", path.display());
            ConfigError::contradiction(what, "use a Llama, Qwen 2 or Qwen 3")
        };
        let text = std::fs::read_to_string(&path).map_err(|e| refused(e.to_string()))?;
        LlamaConfig::from_hugging_face(&text).map_err(refused)
    }

    /// The CNN has no shape to choose, so any shape key is meant for another model.
    fn cnn(&self) -> Result<ModelSpec, ConfigError> {
        let plain = ModelSection {
            name: ModelName::Cnn,
            initial_weights: self.initial_weights.clone(),
            ..ModelSection::default()
        };
        if *self == plain {
            return Ok(ModelSpec::Cnn);
        }
        Err(ConfigError::contradiction(
            "model.name = \"cnn\" has one shape, but other keys of [model] ask for another",
            "remove them, or use model.name = \"llama\"",
        ))
    }
}

fn divide(hidden: usize, heads: usize) -> Result<usize, ConfigError> {
    if heads != 0 && hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    // Searching divisors of an absurd width would take long; its limit is checked elsewhere.
    let nearest = nearest_divisor(hidden.min(1 << 20), heads);
    Err(ConfigError::contradiction(
        format!(
            "model.hidden_size = {hidden} cannot be cut into model.num_attention_heads = {heads}"
        ),
        format!("use model.num_attention_heads = {nearest}, or give model.head_dim"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Flavor;

    fn refusal(section: ModelSection) -> String {
        section.resolve().unwrap_err().to_string()
    }

    #[test]
    fn overrides_change_parts_of_a_flavor() {
        let section = ModelSection {
            flavor: Some(Flavor::Small),
            hidden_size: Some(256),
            ..ModelSection::default()
        };
        let ModelSpec::Llama(shape) = section.resolve().unwrap() else {
            panic!("not a Llama")
        };
        assert_eq!((shape.head_dim, shape.intermediate_size), (32, 1408));
    }

    #[test]
    fn impossible_shapes_are_refused_with_the_nearest() {
        let base = ModelSection::default();
        let message = refusal(ModelSection {
            num_key_value_heads: Some(3),
            ..base.clone()
        });
        assert!(
            message.ends_with("model.num_key_value_heads = 2"),
            "{message}"
        );
        let message = refusal(ModelSection {
            num_attention_heads: Some(5),
            ..base.clone()
        });
        assert!(
            message.contains("use model.num_attention_heads = 4"),
            "{message}"
        );
        let message = refusal(ModelSection {
            vocab_size: Some(usize::MAX),
            ..base
        });
        assert!(message.contains("out of range"), "{message}");
    }

    #[test]
    fn the_cnn_has_one_shape() {
        let cnn = ModelSection {
            name: ModelName::Cnn,
            ..ModelSection::default()
        };
        assert_eq!(cnn.resolve().unwrap().num_parameters(), 6_442_762);
        let message = refusal(ModelSection {
            flavor: Some(Flavor::Tiny),
            ..cnn
        });
        assert!(message.contains("remove them"), "{message}");
    }
}

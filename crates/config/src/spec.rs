//! Resolves the keys of `[model]` to a complete model specification.

use std::path::Path;

use crate::llama::nearest_divisor;
use crate::{ConfigError, Gpt2Config, LlamaConfig, ModelName, ModelSection, MoeConfig, MoeSection};

/// A model with all defaults resolved.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSpec {
    /// A Llama decoder.
    Llama(LlamaConfig),
    /// A GPT-2 decoder.
    Gpt2(Gpt2Config),
    /// The CNN, which has fixed dimensions.
    Cnn,
}

/// The dimensions of a decoder of any family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecoderSizes {
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
    /// Maximum sequence length.
    pub max_position_embeddings: usize,
    /// Whether the output head shares the weights of the embedding.
    pub tie_word_embeddings: bool,
}

impl ModelSpec {
    /// The number of parameters, in closed form.
    pub fn num_parameters(&self) -> u64 {
        match self {
            ModelSpec::Llama(shape) => shape.num_parameters(),
            ModelSpec::Gpt2(shape) => shape.num_parameters(),
            ModelSpec::Cnn => {
                let conv = |from: u64, to: u64| 3 * 3 * from * to + to;
                let linear = |from: u64, to: u64| from * to + to;
                conv(1, 32) + conv(32, 64) + linear(64 * 28 * 28, 128) + linear(128, 10)
            }
        }
    }

    /// The number of active parameters per token, in closed form.
    pub fn num_active_parameters(&self) -> u64 {
        match self {
            ModelSpec::Llama(shape) => shape.num_active_parameters(),
            ModelSpec::Gpt2(_) | ModelSpec::Cnn => self.num_parameters(),
        }
    }

    /// The mixture of experts, if there is one.
    pub fn experts(&self) -> Option<&MoeConfig> {
        match self {
            ModelSpec::Llama(shape) => shape.moe.as_ref(),
            ModelSpec::Gpt2(_) | ModelSpec::Cnn => None,
        }
    }

    /// The dimensions, if it is a decoder.
    pub fn decoder(&self) -> Option<DecoderSizes> {
        match self {
            ModelSpec::Llama(shape) => Some(DecoderSizes {
                vocab_size: shape.vocab_size,
                hidden_size: shape.hidden_size,
                intermediate_size: shape.intermediate_size,
                num_hidden_layers: shape.num_hidden_layers,
                num_attention_heads: shape.num_attention_heads,
                num_key_value_heads: shape.num_key_value_heads,
                head_dim: shape.head_dim,
                max_position_embeddings: shape.max_position_embeddings,
                tie_word_embeddings: shape.tie_word_embeddings,
            }),
            ModelSpec::Gpt2(shape) => Some(DecoderSizes {
                vocab_size: shape.vocab_size,
                hidden_size: shape.hidden_size,
                intermediate_size: shape.intermediate_size,
                num_hidden_layers: shape.num_hidden_layers,
                num_attention_heads: shape.num_attention_heads,
                num_key_value_heads: shape.num_attention_heads,
                head_dim: shape.hidden_size / shape.num_attention_heads,
                max_position_embeddings: shape.max_position_embeddings,
                tie_word_embeddings: shape.tie_word_embeddings,
            }),
            ModelSpec::Cnn => None,
        }
    }
}

impl DecoderSizes {
    /// Total width of all query heads.
    pub fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }
}

impl ModelSection {
    /// Resolves these keys.
    pub fn resolve(&self) -> Result<ModelSpec, ConfigError> {
        let base = match (self.name, &self.hf_assets_path) {
            (ModelName::Cnn, _) => return self.cnn(),
            (_, Some(folder)) => read_shape(folder)?,
            (ModelName::Llama, None) => {
                ModelSpec::Llama(LlamaConfig::of(self.flavor.unwrap_or_default()))
            }
            (ModelName::Gpt2, None) => ModelSpec::Gpt2(Gpt2Config::default()),
        };
        match base {
            ModelSpec::Llama(base) => self.llama(base).map(ModelSpec::Llama),
            ModelSpec::Gpt2(base) => self.gpt2(base).map(ModelSpec::Gpt2),
            ModelSpec::Cnn => Ok(base),
        }
    }

    fn llama(&self, base: LlamaConfig) -> Result<LlamaConfig, ConfigError> {
        self.refuse_keys(
            "a Llama",
            &[("layer_norm_epsilon", self.layer_norm_epsilon.is_some())],
        )?;
        let hidden_size = self.hidden_size.unwrap_or(base.hidden_size);
        let num_attention_heads = self.num_attention_heads.unwrap_or(base.num_attention_heads);
        let is_reshaped = self.hidden_size.is_some() || self.num_attention_heads.is_some();
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None if !is_reshaped => base.head_dim,
            None => divide(hidden_size, num_attention_heads)?,
        };
        let or = |given: Option<usize>, base| given.unwrap_or(base);
        let intermediate_size = or(self.intermediate_size, base.intermediate_size);
        let shape = LlamaConfig {
            moe: match (&self.moe, base.moe) {
                (None, base) => base,
                (Some(keys), base) => Some(MoeSection::resolve(keys, base, intermediate_size)?),
            },
            vocab_size: or(self.vocab_size, base.vocab_size),
            hidden_size,
            intermediate_size,
            num_hidden_layers: or(self.num_hidden_layers, base.num_hidden_layers),
            num_attention_heads,
            num_key_value_heads: or(self.num_key_value_heads, base.num_key_value_heads),
            head_dim,
            rope_theta: self.rope_theta.unwrap_or(base.rope_theta),
            rope_scaling: self.rope_scaling.or(base.rope_scaling),
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

    fn gpt2(&self, base: Gpt2Config) -> Result<Gpt2Config, ConfigError> {
        self.refuse_keys(
            "a GPT-2",
            &[
                ("flavor", self.flavor.is_some()),
                ("num_key_value_heads", self.num_key_value_heads.is_some()),
                ("head_dim", self.head_dim.is_some()),
                ("rope_theta", self.rope_theta.is_some()),
                ("rope_scaling", self.rope_scaling.is_some()),
                ("rms_norm_eps", self.rms_norm_eps.is_some()),
                ("attention_bias", self.attention_bias.is_some()),
                ("qk_norm", self.qk_norm.is_some()),
                ("moe", self.moe.is_some()),
            ],
        )?;
        let or = |given: Option<usize>, base| given.unwrap_or(base);
        let shape = Gpt2Config {
            vocab_size: or(self.vocab_size, base.vocab_size),
            hidden_size: or(self.hidden_size, base.hidden_size),
            intermediate_size: or(self.intermediate_size, base.intermediate_size),
            num_hidden_layers: or(self.num_hidden_layers, base.num_hidden_layers),
            num_attention_heads: or(self.num_attention_heads, base.num_attention_heads),
            max_position_embeddings: or(self.max_position_embeddings, base.max_position_embeddings),
            layer_norm_epsilon: self.layer_norm_epsilon.unwrap_or(base.layer_norm_epsilon),
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(base.tie_word_embeddings),
            resid_pdrop: self.resid_pdrop.unwrap_or(base.resid_pdrop),
        };
        shape.check()?;
        divide(shape.hidden_size, shape.num_attention_heads)?;
        Ok(shape)
    }

    /// Rejects keys that the family does not have.
    fn refuse_keys(&self, family: &str, keys: &[(&str, bool)]) -> Result<(), ConfigError> {
        match keys.iter().find(|(_, is_set)| *is_set) {
            None => Ok(()),
            Some((key, _)) => Err(ConfigError::contradiction(
                format!("model.{key} is set, but {family} has no such key"),
                format!("remove model.{key}"),
            )),
        }
    }

    /// Rejects keys that set dimensions of the CNN, because they are fixed.
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
            "model.name = \"cnn\" has fixed dimensions, but other keys of [model] set them",
            "remove them, or use model.name = \"llama\"",
        ))
    }
}

/// The dimensions of a Hugging Face folder.
fn read_shape(folder: &Path) -> Result<ModelSpec, ConfigError> {
    let path = folder.join("config.json");
    let rejected = |reason: String| {
        let what = format!("model.hf_assets_path: {}: {reason}", path.display());
        ConfigError::contradiction(
            what,
            "use a Llama, Qwen 2, Qwen 3, Mixtral, Qwen 3 MoE or GPT-2",
        )
    };
    let text = std::fs::read_to_string(&path).map_err(|e| rejected(e.to_string()))?;
    ModelSpec::from_hugging_face(&text).map_err(rejected)
}

fn divide(hidden: usize, heads: usize) -> Result<usize, ConfigError> {
    if heads != 0 && hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    // Searching the divisors of a huge number would take long; its limit is checked elsewhere.
    let nearest = nearest_divisor(hidden.min(1 << 20), heads);
    Err(ConfigError::contradiction(
        format!(
            "model.hidden_size = {hidden} is not divisible by model.num_attention_heads = {heads}"
        ),
        format!("use model.num_attention_heads = {nearest}, or give model.head_dim"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Flavor;

    fn rejection(section: ModelSection) -> String {
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
        let message = rejection(ModelSection {
            num_key_value_heads: Some(3),
            ..base.clone()
        });
        assert!(
            message.ends_with("model.num_key_value_heads = 2"),
            "{message}"
        );
        let message = rejection(ModelSection {
            num_attention_heads: Some(5),
            ..base.clone()
        });
        assert!(
            message.contains("use model.num_attention_heads = 4"),
            "{message}"
        );
        let message = rejection(ModelSection {
            vocab_size: Some(usize::MAX),
            ..base
        });
        assert!(message.contains("out of range"), "{message}");
    }

    #[test]
    fn the_cnn_has_fixed_dimensions() {
        let cnn = ModelSection {
            name: ModelName::Cnn,
            ..ModelSection::default()
        };
        assert_eq!(cnn.resolve().unwrap().num_parameters(), 6_442_762);
        let message = rejection(ModelSection {
            flavor: Some(Flavor::Tiny),
            ..cnn
        });
        assert!(message.contains("remove them"), "{message}");
    }
}

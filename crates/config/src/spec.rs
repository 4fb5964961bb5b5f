//! Resolves the keys of `[model]` to a complete description of the model.

use std::path::Path;

use trainyard_arch::{ArchError, DecoderConfig, MoeConfig, QkNorm, VitConfig, nearest_divisor};

use crate::{Choice, ConfigError, ModelName, ModelSection, MoeSection};

/// A model with all defaults resolved.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSpec {
    /// A decoder-only transformer.
    Decoder(Box<DecoderConfig>),
    /// The CNN, which has fixed dimensions.
    Cnn,
    /// A vision transformer.
    Vit(Box<VitConfig>),
    /// A model that a program registers under this name, and that only this program can build.
    Custom(String),
}

impl ModelSpec {
    /// The number of parameters, in closed form; `None` for a registered model.
    pub fn num_parameters(&self) -> Option<u64> {
        Some(match self {
            ModelSpec::Custom(_) => return None,
            ModelSpec::Decoder(decoder) => decoder.num_parameters(),
            ModelSpec::Vit(vit) => vit.num_parameters(),
            ModelSpec::Cnn => {
                let conv = |from: u64, to: u64| 3 * 3 * from * to + to;
                let linear = |from: u64, to: u64| from * to + to;
                conv(1, 32) + conv(32, 64) + linear(64 * 28 * 28, 128) + linear(128, 10)
            }
        })
    }

    /// The number of units; `None` for a registered model.
    pub fn num_units(&self) -> Option<usize> {
        match self {
            ModelSpec::Decoder(decoder) => Some(decoder.num_hidden_layers.saturating_add(2)),
            ModelSpec::Cnn => Some(4),
            ModelSpec::Vit(vit) => Some(vit.encoder.num_hidden_layers.saturating_add(2)),
            ModelSpec::Custom(_) => None,
        }
    }

    /// The decoder, if it is one.
    pub fn decoder(&self) -> Option<&DecoderConfig> {
        match self {
            ModelSpec::Decoder(decoder) => Some(decoder),
            ModelSpec::Cnn | ModelSpec::Vit(_) | ModelSpec::Custom(_) => None,
        }
    }

    /// The experts, if there are some.
    pub fn experts(&self) -> Option<&MoeConfig> {
        self.decoder()?.moe.as_ref()
    }
}

/// Replaces fields by the keys of a section that are set.
macro_rules! set_fields {
    ($section:expr => $target:expr; $($field:ident),+ $(,)?) => {
        $(if let Some(value) = $section.$field {
            $target.$field = value;
        })+
    };
}

impl ModelSection {
    /// Resolves these keys.
    pub fn resolve(&self) -> Result<ModelSpec, ConfigError> {
        let name = match &self.name {
            Choice::Builtin(name) => *name,
            Choice::Custom(name) => return self.custom(name),
        };
        let base = match (name, &self.hf_assets_path) {
            (ModelName::Cnn, _) => return self.cnn(),
            (ModelName::Vit, _) => return self.vit(),
            (ModelName::Encoder, Some(_)) => {
                self.refuse_keys("an encoder", &[("hf_assets_path", true)])?;
                DecoderConfig::encoder()
            }
            (_, Some(folder)) => read_decoder(folder)?,
            (ModelName::Llama, None) => DecoderConfig::from(self.flavor.unwrap_or_default()),
            (ModelName::Gpt2, None) => DecoderConfig::gpt2(),
            (ModelName::Encoder, None) => DecoderConfig::encoder(),
        };
        let decoder = if base.is_gpt2() {
            self.gpt2(base)?
        } else {
            self.refuse_keys(
                "a Llama",
                &[("layer_norm_epsilon", self.layer_norm_epsilon.is_some())],
            )?;
            self.overridden(base)?
        };
        decoder.check().map_err(in_section)?;
        Ok(ModelSpec::Decoder(decoder.into()))
    }

    /// The keys that are set, in place of those of `base`.
    fn overridden(&self, mut base: DecoderConfig) -> Result<DecoderConfig, ConfigError> {
        set_fields!(self => base; vocab_size, hidden_size, intermediate_size, num_hidden_layers,
            num_attention_heads, num_key_value_heads, rope_theta, tie_word_embeddings,
            attention_bias, max_position_embeddings, resid_pdrop);
        base.rope_scaling = self.rope_scaling.or(base.rope_scaling);
        base.norm_eps = self.rms_norm_eps.unwrap_or(base.norm_eps);
        if let Some(is_normed) = self.qk_norm {
            let usual = base.qk_norm.unwrap_or(QkNorm::Head);
            base.qk_norm = is_normed.then_some(usual);
        }
        let is_reshaped = self.hidden_size.is_some() || self.num_attention_heads.is_some();
        base.head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None if !is_reshaped => base.head_dim,
            None => divide(base.hidden_size, base.num_attention_heads)?,
        };
        self.override_window(&mut base)?;
        self.override_latent(&mut base)?;
        if let Some(keys) = &self.moe {
            base.moe = Some(keys.overridden(base.moe, base.intermediate_size)?);
        }
        Ok(base)
    }

    fn override_window(&self, base: &mut DecoderConfig) -> Result<(), ConfigError> {
        match &mut base.sliding_window {
            Some(window) => {
                set_fields!(self => window; sliding_window);
                Ok(())
            }
            None => self.refuse_keys(
                "this model",
                &[("sliding_window", self.sliding_window.is_some())],
            ),
        }
    }

    fn override_latent(&self, base: &mut DecoderConfig) -> Result<(), ConfigError> {
        let Some(latent) = &mut base.latent else {
            return self.refuse_keys(
                "a model without latent attention",
                &[
                    ("q_lora_rank", self.q_lora_rank.is_some()),
                    ("kv_lora_rank", self.kv_lora_rank.is_some()),
                    ("qk_nope_head_dim", self.qk_nope_head_dim.is_some()),
                    ("qk_rope_head_dim", self.qk_rope_head_dim.is_some()),
                    ("v_head_dim", self.v_head_dim.is_some()),
                ],
            );
        };
        latent.q_lora_rank = self.q_lora_rank.or(latent.q_lora_rank);
        set_fields!(self => latent; kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim);
        base.head_dim = latent.qk_head_dim();
        Ok(())
    }

    fn gpt2(&self, base: DecoderConfig) -> Result<DecoderConfig, ConfigError> {
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
        let decoder = self.overridden(base)?;
        Ok(DecoderConfig {
            num_key_value_heads: decoder.num_attention_heads,
            norm_eps: self.layer_norm_epsilon.unwrap_or(decoder.norm_eps),
            ..decoder
        })
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

    /// The vision transformer, of which keys may set the sizes of blocks.
    fn vit(&self) -> Result<ModelSpec, ConfigError> {
        self.refuse_keys(
            "a vision transformer",
            &[
                ("vocab_size", self.vocab_size.is_some()),
                ("tie_word_embeddings", self.tie_word_embeddings.is_some()),
                (
                    "max_position_embeddings",
                    self.max_position_embeddings.is_some(),
                ),
                ("hf_assets_path", self.hf_assets_path.is_some()),
            ],
        )?;
        let base = VitConfig::mnist();
        let encoder = self.gpt2(base.encoder.clone())?;
        encoder.check().map_err(in_section)?;
        Ok(ModelSpec::Vit(Box::new(VitConfig { encoder, ..base })))
    }

    /// Rejects keys that set dimensions of the CNN, because they are fixed.
    fn cnn(&self) -> Result<ModelSpec, ConfigError> {
        let plain = ModelSection {
            name: ModelName::Cnn.into(),
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

impl ModelSection {
    /// A registered model has its keys in a section of its own. The vocabulary is that of the datasets of tokens.
    fn custom(&self, name: &str) -> Result<ModelSpec, ConfigError> {
        let plain = ModelSection {
            name: self.name.clone(),
            vocab_size: self.vocab_size,
            initial_weights: self.initial_weights.clone(),
            ..ModelSection::default()
        };
        if *self == plain {
            return Ok(ModelSpec::Custom(name.to_owned()));
        }
        Err(ConfigError::contradiction(
            format!(
                "model.name = {name:?} is a model of your own, but keys of Trainyard's models are set in [model]"
            ),
            format!(
                "move them to [custom.{name}]; only vocab_size and initial_weights are valid in [model]"
            ),
        ))
    }
}

impl MoeSection {
    /// The keys that are set, in place of those of `base` if it is given; `width` is the width of a dense MLP.
    fn overridden(&self, base: Option<MoeConfig>, width: usize) -> Result<MoeConfig, ConfigError> {
        let number = self.num_experts.or(base.as_ref().map(|b| b.num_experts));
        let Some(num_experts) = number else {
            return Err(ConfigError::contradiction(
                "[model.moe] does not set the number of experts",
                "set model.moe.num_experts",
            ));
        };
        let plain = || MoeConfig::plain(num_experts, 2.min(num_experts), width);
        let mut experts = base.unwrap_or_else(plain);
        set_fields!(self => experts; num_experts, num_experts_per_tok, moe_intermediate_size,
            n_shared_experts, first_k_dense_replace, scoring_func, norm_topk_prob,
            routed_scaling_factor, router_aux_loss_coef, router_z_loss_coef);
        experts.bias_update_rate = self.bias_update_rate.or(experts.bias_update_rate);
        experts.capacity_factor = self.capacity_factor.or(experts.capacity_factor);
        Ok(experts)
    }
}

/// The rejection of a decoder, as one of the keys of `[model]`.
fn in_section(error: ArchError) -> ConfigError {
    let remedy = "change these keys of [model]";
    match error {
        ArchError::Contradiction { what, remedy } => {
            ConfigError::contradiction(format!("model.{what}"), remedy)
        }
        ArchError::Range { key, value, limit } => ConfigError::contradiction(
            format!("model.{key} = {value} is out of range"),
            format!("use 1 to {limit}"),
        ),
        other => ConfigError::contradiction(other.to_string(), remedy),
    }
}

/// The decoder of a Hugging Face folder.
fn read_decoder(folder: &Path) -> Result<DecoderConfig, ConfigError> {
    let path = folder.join("config.json");
    let rejected = |reason: String| {
        let what = format!("model.hf_assets_path: {}: {reason}", path.display());
        ConfigError::contradiction(
            what,
            "use the folder of a supported model, which the book lists under Checkpoints",
        )
    };
    let text = std::fs::read_to_string(&path).map_err(|e| rejected(e.to_string()))?;
    let decoder = DecoderConfig::from_hugging_face(&text);
    let decoder = decoder.and_then(|decoder| decoder.check_trainable().map(|()| decoder));
    decoder.map_err(|error| rejected(error.to_string()))
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
    use trainyard_arch::Flavor;

    use super::*;

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
        let spec = section.resolve().unwrap();
        let decoder = spec.decoder().unwrap();
        assert_eq!((decoder.head_dim, decoder.intermediate_size), (32, 1408));
    }

    #[test]
    fn impossible_shapes_are_refused_with_the_nearest() {
        let base = ModelSection::default();
        let message = rejection(ModelSection {
            num_key_value_heads: Some(3),
            ..base.clone()
        });
        assert!(message.ends_with("num_key_value_heads = 2"), "{message}");
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
            name: ModelName::Cnn.into(),
            ..ModelSection::default()
        };
        assert_eq!(cnn.resolve().unwrap().num_parameters(), Some(6_442_762));
        let message = rejection(ModelSection {
            flavor: Some(Flavor::Tiny),
            ..cnn
        });
        assert!(message.contains("remove them"), "{message}");
    }
}

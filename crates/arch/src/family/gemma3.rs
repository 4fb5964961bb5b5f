//! Gemma 3, its text model.

use serde_json::{Map, Value, json};

use super::window_keys::{self, Defaults};
use super::{Family, Keys, llama};
use crate::{Activation, ArchError, DecoderConfig, Norm, NormPlacement, QkNorm};

pub(super) const GEMMA3: Family = Family {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    read,
    write,
};

const DEFAULTS: Defaults = Defaults {
    sliding_window: 4096,
    full_attention_every: 6,
    rope_theta: 1e6,
    rope_local_base_freq: Some(1e4),
};

fn read(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    keys.refuse_unless(&[
        ("attention_bias", json!(false)),
        ("hidden_activation", json!("gelu_pytorch_tanh")),
        ("final_logit_softcapping", Value::Null),
        ("attn_logit_softcapping", Value::Null),
        ("use_bidirectional_attention", json!(false)),
    ])?;
    let scalar = keys.float("query_pre_attn_scalar")?.unwrap_or(256.0);
    let decoder = DecoderConfig {
        tie_word_embeddings: keys.flag("tie_word_embeddings")?.unwrap_or(true),
        norm: Norm::RootMeanSquarePlusOne,
        norm_placement: NormPlacement::BeforeAndAfter,
        hidden_act: Activation::GeluTanh,
        qk_norm: Some(QkNorm::Head),
        query_pre_attn_scalar: Some(scalar),
        scales_embedding: true,
        ..llama::read(keys)?
    };
    window_keys::read(keys, &DEFAULTS, decoder)
}

fn write(decoder: &DecoderConfig) -> Map<String, Value> {
    let mut keys = llama::write(decoder);
    let scalar = decoder.query_pre_attn_scalar;
    keys.remove("hidden_act");
    keys.insert("hidden_activation".to_owned(), json!("gelu_pytorch_tanh"));
    // A whole number in every published file.
    let scalar = match scalar {
        Some(scalar) if scalar.fract() == 0.0 => json!(scalar as u64),
        scalar => json!(scalar),
    };
    keys.insert("query_pre_attn_scalar".to_owned(), scalar);
    window_keys::write(decoder, &mut keys);
    keys
}

//! Gemma 3, its text model.

use serde_json::{Map, Value, json};

use super::{Family, Keys, llama, map, rope_keys};
use crate::{Activation, ArchError, DecoderConfig, Norm, NormPlacement, QkNorm, SlidingWindow};

pub(super) const GEMMA3: Family = Family {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    read,
    write,
};

/// The defaults of Hugging Face.
const GLOBAL_THETA: f64 = 1e6;
const LOCAL_THETA: f64 = 1e4;
const PATTERN: usize = 6;

fn read(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    keys.refuse_unless(&[
        ("attention_bias", json!(false)),
        ("hidden_activation", json!("gelu_pytorch_tanh")),
        ("final_logit_softcapping", Value::Null),
        ("attn_logit_softcapping", Value::Null),
        ("use_bidirectional_attention", json!(false)),
    ])?;
    let rope = keys.object("rope_parameters")?;
    let of = |kind: &str| rope.as_ref().map(|rope| rope.object(kind)).transpose();
    let (global, local) = (
        of("full_attention")?.flatten(),
        of("sliding_attention")?.flatten(),
    );
    let theta = |rope: &Option<Keys>, key: &str, default: f64| -> Result<f64, ArchError> {
        let nested = rope
            .as_ref()
            .map(|rope| rope.float("rope_theta"))
            .transpose()?;
        Ok(nested.flatten().or(keys.float(key)?).unwrap_or(default))
    };
    let scaling = global.as_ref().map(rope_keys::read).transpose()?.flatten();
    let window = SlidingWindow {
        sliding_window: keys.number("sliding_window")?.unwrap_or(4096),
        full_attention_every: Some(full_attention_every(keys)?),
        rope_local_base_freq: Some(theta(&local, "rope_local_base_freq", LOCAL_THETA)?),
    };
    let scalar = keys.float("query_pre_attn_scalar")?.unwrap_or(256.0);
    Ok(DecoderConfig {
        tie_word_embeddings: keys.flag("tie_word_embeddings")?.unwrap_or(true),
        rope_theta: theta(&global, "rope_theta", GLOBAL_THETA)?,
        rope_scaling: match scaling {
            Some(scaling) => Some(scaling),
            None => rope_keys::scaling(keys)?,
        },
        norm: Norm::RootMeanSquarePlusOne,
        norm_placement: NormPlacement::BeforeAndAfter,
        hidden_act: Activation::GeluTanh,
        qk_norm: Some(QkNorm::Head),
        query_pre_attn_scalar: Some(scalar),
        sliding_window: Some(window),
        scales_embedding: true,
        ..llama::read(keys)?
    })
}

/// Which blocks attend to all positions: newer files name the type of every block.
fn full_attention_every(keys: &Keys) -> Result<usize, ArchError> {
    let Some(types) = keys.array("layer_types")? else {
        return Ok(keys.number("sliding_window_pattern")?.unwrap_or(PATTERN));
    };
    let is_full = |kind: &Value| kind == "full_attention";
    let first = types.iter().position(is_full);
    let every = first.map_or(types.len() + 1, |first| first + 1);
    let is_regular =
        |(index, kind): (usize, &Value)| is_full(kind) == (index + 1).is_multiple_of(every);
    if types.iter().enumerate().all(is_regular) {
        Ok(every)
    } else {
        Err(ArchError::not_built(
            "layer_types without a regular pattern",
        ))
    }
}

fn write(decoder: &DecoderConfig) -> Map<String, Value> {
    let mut keys = llama::write(decoder);
    let scalar = decoder.query_pre_attn_scalar;
    let mut global = map(rope_keys::write(decoder.rope_scaling.as_ref()));
    global.entry("rope_type").or_insert(json!("default"));
    global.insert("rope_theta".to_owned(), json!(decoder.rope_theta));
    for key in ["hidden_act", "rope_theta", "rope_scaling"] {
        keys.remove(key);
    }
    keys.insert("hidden_activation".to_owned(), json!("gelu_pytorch_tanh"));
    // A whole number in every file.
    keys.insert(
        "query_pre_attn_scalar".to_owned(),
        json!(scalar.map(|scalar| scalar as u64)),
    );
    if let Some(window) = &decoder.sliding_window {
        let kind = |index| {
            if window.applies_to(index) {
                "sliding_attention"
            } else {
                "full_attention"
            }
        };
        let types: Vec<&str> = (0..decoder.num_hidden_layers).map(kind).collect();
        let local = json!({ "rope_type": "default", "rope_theta": window.rope_local_base_freq });
        keys.insert("layer_types".to_owned(), json!(types));
        keys.insert("sliding_window".to_owned(), json!(window.sliding_window));
        let parameters = json!({ "full_attention": global, "sliding_attention": local });
        keys.insert("rope_parameters".to_owned(), parameters);
    }
    keys
}

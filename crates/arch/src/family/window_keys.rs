//! The keys of sliding windows: which blocks have one, and the rotary embeddings of both kinds of blocks.

use serde_json::{Map, Value, json};

use super::{Keys, map, rope_keys};
use crate::{ArchError, DecoderConfig, SlidingWindow};

/// What a family has if its file does not say otherwise.
pub(super) struct Defaults {
    pub(super) sliding_window: usize,
    /// Every block whose number is a multiple of this attends to all positions.
    pub(super) full_attention_every: usize,
    /// The bases of the rotary frequencies in blocks without and with a window.
    pub(super) thetas: [f64; 2],
}

/// `decoder` with the windows that a file describes.
pub(super) fn read(
    keys: &Keys,
    defaults: &Defaults,
    decoder: DecoderConfig,
) -> Result<DecoderConfig, ArchError> {
    let rope = keys.object("rope_parameters")?;
    let of = |kind: &str| rope.as_ref().map(|rope| rope.object(kind)).transpose();
    let (global, local) = (
        of("full_attention")?.flatten(),
        of("sliding_attention")?.flatten(),
    );
    let theta = |rope: &Option<Keys>, key: &str, default: f64| -> Result<f64, ArchError> {
        let nested = rope.as_ref().map(|rope| rope.float("rope_theta"));
        let nested = nested.transpose()?.flatten();
        Ok(nested.or(keys.float(key)?).unwrap_or(default))
    };
    let scaling = global.as_ref().map(rope_keys::read).transpose()?.flatten();
    let [global_theta, local_theta] = defaults.thetas;
    let window = SlidingWindow {
        sliding_window: keys
            .number("sliding_window")?
            .unwrap_or(defaults.sliding_window),
        full_attention_every: Some(full_attention_every(keys, defaults)?),
        rope_local_base_freq: Some(theta(&local, "rope_local_base_freq", local_theta)?),
    };
    Ok(DecoderConfig {
        rope_theta: theta(&global, "rope_theta", global_theta)?,
        rope_scaling: match scaling {
            Some(scaling) => Some(scaling),
            None => rope_keys::scaling(keys)?,
        },
        sliding_window: Some(window),
        ..decoder
    })
}

/// Which blocks attend to all positions: newer files name the type of every block.
fn full_attention_every(keys: &Keys, defaults: &Defaults) -> Result<usize, ArchError> {
    let Some(types) = keys.array("layer_types")? else {
        let pattern = keys.number("sliding_window_pattern")?;
        return Ok(pattern.unwrap_or(defaults.full_attention_every));
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

/// Replaces the keys of the rotary embedding in `keys` by those of both kinds of blocks.
pub(super) fn write(decoder: &DecoderConfig, keys: &mut Map<String, Value>) {
    let Some(window) = &decoder.sliding_window else {
        return;
    };
    for key in ["rope_theta", "rope_scaling"] {
        keys.remove(key);
    }
    let mut global = map(rope_keys::write(decoder.rope_scaling.as_ref()));
    global.entry("rope_type").or_insert(json!("default"));
    global.insert("rope_theta".to_owned(), json!(decoder.rope_theta));
    let local = json!({ "rope_type": "default", "rope_theta": window.rope_local_base_freq });
    let kind = |index| {
        if window.applies_to(index) {
            "sliding_attention"
        } else {
            "full_attention"
        }
    };
    let types: Vec<&str> = (0..decoder.num_hidden_layers).map(kind).collect();
    for (key, value) in [
        ("layer_types", json!(types)),
        ("sliding_window", json!(window.sliding_window)),
        (
            "rope_parameters",
            json!({ "full_attention": global, "sliding_attention": local }),
        ),
    ] {
        keys.insert(key.to_owned(), value);
    }
}

//! The keys of sliding windows: which blocks have one, and the rotary embeddings of both kinds of blocks.

use serde_json::{Map, Value, json};

use super::{Keys, map, rope_keys};
use crate::{ArchError, DecoderConfig, SlidingWindow};

/// What a family has if its file does not say otherwise.
pub(super) struct Defaults {
    pub(super) sliding_window: usize,
    /// Every block whose number is a multiple of this attends to all positions.
    pub(super) full_attention_every: usize,
    /// Base of the rotary frequencies in blocks without a window.
    pub(super) rope_theta: f64,
    /// Base of those in blocks with a window; the same as in the others if absent.
    pub(super) rope_local_base_freq: Option<f64>,
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
    if local
        .as_ref()
        .map(rope_keys::read)
        .transpose()?
        .flatten()
        .is_some()
    {
        return Err(ArchError::not_built(
            "scaled frequencies in blocks with a window",
        ));
    }
    let rope_theta = theta(&global, "rope_theta", defaults.rope_theta)?;
    let local_theta = defaults.rope_local_base_freq.unwrap_or(rope_theta);
    let window = SlidingWindow {
        sliding_window: keys
            .number("sliding_window")?
            .unwrap_or(defaults.sliding_window),
        full_attention_every: full_attention_every(keys, defaults, decoder.num_hidden_layers)?,
        rope_local_base_freq: Some(theta(&local, "rope_local_base_freq", local_theta)?),
    };
    Ok(DecoderConfig {
        rope_theta,
        rope_scaling: match scaling {
            Some(scaling) => Some(scaling),
            None => rope_keys::scaling(keys)?,
        },
        sliding_window: Some(window),
        ..decoder
    })
}

/// Which blocks attend to all positions; none if absent. Newer files name the type of every block.
fn full_attention_every(
    keys: &Keys,
    defaults: &Defaults,
    num_layers: usize,
) -> Result<Option<usize>, ArchError> {
    let every = match keys.array("layer_types")? {
        Some(types) => pattern_of(types, num_layers)?,
        None => {
            let pattern = keys.number("sliding_window_pattern")?;
            Some(pattern.unwrap_or(defaults.full_attention_every))
        }
    };
    match every {
        Some(0) => Err(ArchError::contradiction(
            "sliding_window_pattern = 0",
            "use 1 or more",
        )),
        every => Ok(every.filter(|every| *every <= num_layers)),
    }
}

/// The number of blocks from one with full attention to the next; none if all have windows.
fn pattern_of(types: &[Value], num_layers: usize) -> Result<Option<usize>, ArchError> {
    let is_full = |kind: &Value| kind == "full_attention";
    let is_known = |kind: &Value| is_full(kind) || kind == "sliding_attention";
    let every = types.iter().position(is_full).map(|first| first + 1);
    let is_regular = |(index, kind): (usize, &Value)| {
        let expected = every.is_some_and(|every| (index + 1).is_multiple_of(every));
        is_known(kind) && is_full(kind) == expected
    };
    if types.len() == num_layers && types.iter().enumerate().all(is_regular) {
        Ok(every)
    } else {
        Err(ArchError::not_built(
            "layer_types that do not name one type of attention per block in a regular pattern",
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

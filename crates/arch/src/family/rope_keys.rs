//! The keys of a rotary embedding, in the layouts of older and newer files.

use serde_json::{Value, json};

use super::Keys;
use crate::{ArchError, DecoderConfig, RopeScaling};

/// The base of the frequencies. Newer files have it among the parameters of the rotary embedding.
pub(super) fn theta(keys: &Keys) -> Result<f64, ArchError> {
    let nested = keys.object("rope_parameters")?;
    let nested = nested.map(|rope| rope.float("rope_theta")).transpose()?;
    let theta = keys.float("rope_theta")?.or(nested.flatten());
    Ok(theta.unwrap_or(DecoderConfig::llama().rope_theta))
}

/// The scaling of the frequencies; newer files have it next to the base.
pub(super) fn scaling(keys: &Keys) -> Result<Option<RopeScaling>, ArchError> {
    for key in ["rope_parameters", "rope_scaling"] {
        if let Some(rope) = keys.object(key)?
            && let Some(scaling) = read(&rope)?
        {
            return Ok(Some(scaling));
        }
    }
    Ok(None)
}

/// The scaling that the parameters of a rotary embedding describe.
pub(super) fn read(rope: &Keys) -> Result<Option<RopeScaling>, ArchError> {
    rope.refuse_unless(&[
        ("partial_rotary_factor", json!(1.0)),
        ("truncate", json!(true)),
    ])?;
    // `type` is the name in older files.
    let kind = rope.text("rope_type")?.or(rope.text("type")?);
    let kind = kind.unwrap_or("default");
    if kind == "default" {
        return Ok(None);
    }
    let mut keys = rope.map().clone();
    keys.insert("rope_type".to_owned(), kind.into());
    let scaling = serde_json::from_value(Value::Object(keys));
    let scaling =
        scaling.map_err(|error| ArchError::not_built(format!("rope_scaling: {error}")))?;
    Ok(Some(scaling))
}

/// `rope_scaling` as a file has it.
pub(super) fn write(scaling: Option<&RopeScaling>) -> Value {
    json!(scaling)
}

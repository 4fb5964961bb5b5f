//! Phi-3 and Phi-4: a Llama whose files have fused projections.

use serde_json::{Map, Value, json};

use super::{Family, Keys, llama};
use crate::{ArchError, DecoderConfig};

pub(super) const PHI3: Family = Family {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    read,
    write,
};

fn read(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    keys.refuse_unless(&[
        ("attention_bias", json!(false)),
        ("partial_rotary_factor", json!(1.0)),
    ])?;
    let decoder = llama::read(keys)?;
    // A window as long as the longest sequence is none.
    let window = keys.number("sliding_window")?;
    let window = window.filter(|window| *window < decoder.max_position_embeddings);
    match window {
        Some(window) => Err(ArchError::not_built(format!("sliding_window = {window}"))),
        None => Ok(DecoderConfig {
            has_fused_projections: true,
            ..decoder
        }),
    }
}

fn write(decoder: &DecoderConfig) -> Map<String, Value> {
    let mut keys = llama::write(decoder);
    llama::remove_usual_head_dim(decoder, &mut keys);
    // Others than those of Phi's own vocabulary, which may be larger than this one.
    for key in ["pad_token_id", "bos_token_id", "eos_token_id"] {
        keys.insert(key.to_owned(), Value::Null);
    }
    keys
}

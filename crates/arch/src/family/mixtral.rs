//! Mixtral.

use serde_json::{Map, Value, json};

use super::{Family, Keys, llama};
use crate::{ArchError, DecoderConfig, MoeConfig};

pub(super) const MIXTRAL: Family = Family {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    read,
    write,
};

fn read(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    keys.refuse_unless(&[
        ("sliding_window", Value::Null),
        ("router_jitter_noise", json!(0.0)),
    ])?;
    let decoder = llama::read(keys)?;
    Ok(DecoderConfig {
        moe: Some(MoeConfig::plain(
            keys.need("num_local_experts")?,
            keys.need("num_experts_per_tok")?,
            decoder.intermediate_size,
        )),
        ..decoder
    })
}

fn write(decoder: &DecoderConfig) -> Map<String, Value> {
    let mut keys = llama::write(decoder);
    if let Some(moe) = &decoder.moe {
        for (key, value) in [
            ("num_local_experts", json!(moe.num_experts)),
            ("num_experts_per_tok", json!(moe.num_experts_per_tok)),
            // It has no dense blocks, whose width this is in other families.
            ("intermediate_size", json!(moe.moe_intermediate_size)),
            ("sliding_window", Value::Null),
        ] {
            keys.insert(key.to_owned(), value);
        }
    }
    keys
}

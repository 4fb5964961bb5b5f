//! OLMo 2.

use serde_json::{Map, Value, json};

use super::{Family, Keys, llama};
use crate::{ArchError, DecoderConfig, NormPlacement, QkNorm};

pub(super) const OLMO2: Family = Family {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    read,
    write,
};

pub(super) fn read(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    keys.refuse_unless(&[("attention_bias", json!(false))])?;
    Ok(DecoderConfig {
        norm_eps: keys.float("rms_norm_eps")?.unwrap_or(1e-5),
        norm_placement: NormPlacement::After,
        qk_norm: Some(QkNorm::AllHeads),
        ..llama::read(keys)?
    })
}

pub(super) fn write(decoder: &DecoderConfig) -> Map<String, Value> {
    let mut keys = llama::write(decoder);
    llama::remove_usual_head_dim(decoder, &mut keys);
    keys
}

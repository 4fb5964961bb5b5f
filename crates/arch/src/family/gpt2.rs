//! GPT-2, whose keys have older names.

use serde_json::{Map, Value, json};

use super::{Family, Keys, map};
use crate::{ArchError, DecoderConfig};

pub(super) const GPT2: Family = Family {
    model_type: "gpt2",
    architecture: "GPT2LMHeadModel",
    read,
    write,
};

fn read(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    keys.refuse_unless(&[
        ("scale_attn_by_inverse_layer_idx", json!(false)),
        ("scale_attn_weights", json!(true)),
        ("add_cross_attention", json!(false)),
    ])?;
    let function = keys.text("activation_function")?;
    if !matches!(function, None | Some("gelu_new" | "gelu_pytorch_tanh")) {
        return Err(ArchError::not_built(format!(
            "activation_function = {function:?}"
        )));
    }
    let plain = DecoderConfig::gpt(
        keys.need("n_layer")?,
        keys.need("n_embd")?,
        keys.need("n_head")?,
        keys.need("vocab_size")?,
        keys.need("n_positions")?,
    );
    Ok(DecoderConfig {
        intermediate_size: keys.number("n_inner")?.unwrap_or(plain.intermediate_size),
        norm_eps: keys.float("layer_norm_epsilon")?.unwrap_or(plain.norm_eps),
        tie_word_embeddings: keys.flag("tie_word_embeddings")?.unwrap_or(true),
        ..plain
    })
}

fn write(decoder: &DecoderConfig) -> Map<String, Value> {
    map(json!({
        "vocab_size": decoder.vocab_size,
        "n_embd": decoder.hidden_size,
        "n_inner": decoder.intermediate_size,
        "n_layer": decoder.num_hidden_layers,
        "n_head": decoder.num_attention_heads,
        "n_positions": decoder.max_position_embeddings,
        "layer_norm_epsilon": decoder.norm_eps,
        "tie_word_embeddings": decoder.tie_word_embeddings,
        "activation_function": "gelu_new",
    }))
}

//! Llama and Mistral, and what their relatives share with them.

use serde_json::{Map, Value, json};

use super::{Family, Keys, map, rope_keys};
use crate::{ArchError, DecoderConfig, SlidingWindow};

pub(super) const LLAMA: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    read: read_llama,
    write,
};

pub(super) const MISTRAL: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    read: read_mistral,
    write: write_mistral,
};

fn read_llama(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    keys.refuse_unless(&[("attention_bias", json!(false)), ("mlp_bias", json!(false))])?;
    read(keys)
}

fn read_mistral(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    Ok(DecoderConfig {
        sliding_window: keys.number("sliding_window")?.map(window),
        ..read(keys)?
    })
}

fn write_mistral(decoder: &DecoderConfig) -> Map<String, Value> {
    let mut keys = write(decoder);
    let window = decoder.sliding_window.map(|window| window.sliding_window);
    keys.insert("sliding_window".to_owned(), json!(window));
    keys
}

/// A window in every block.
fn window(sliding_window: usize) -> SlidingWindow {
    SlidingWindow {
        sliding_window,
        full_attention_every: None,
        rope_local_base_freq: None,
    }
}

/// Reads the keys that all relatives of Llama have.
pub(super) fn read(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    keys.refuse_unless(&[
        ("hidden_act", json!("silu")),
        ("use_sliding_window", json!(false)),
    ])?;
    let hidden_size = keys.need("hidden_size")?;
    let num_attention_heads = keys.need("num_attention_heads")?;
    let head_dim = hidden_size.checked_div(num_attention_heads);
    let plain = DecoderConfig::llama();
    Ok(DecoderConfig {
        vocab_size: keys.need("vocab_size")?,
        hidden_size,
        intermediate_size: keys.need("intermediate_size")?,
        num_hidden_layers: keys.need("num_hidden_layers")?,
        num_attention_heads,
        num_key_value_heads: keys
            .number("num_key_value_heads")?
            .unwrap_or(num_attention_heads),
        head_dim: keys.number("head_dim")?.or(head_dim).unwrap_or(0),
        max_position_embeddings: keys
            .number("max_position_embeddings")?
            .unwrap_or(plain.max_position_embeddings),
        tie_word_embeddings: keys.flag("tie_word_embeddings")?.unwrap_or(false),
        rope_theta: rope_keys::theta(keys)?,
        rope_scaling: rope_keys::scaling(keys)?,
        norm_eps: keys.float("rms_norm_eps")?.unwrap_or(plain.norm_eps),
        ..plain
    })
}

/// Removes `head_dim` if it is `hidden_size / num_attention_heads`: most files of some families do not have it.
pub(super) fn remove_usual_head_dim(decoder: &DecoderConfig, keys: &mut Map<String, Value>) {
    if decoder.query_width() == decoder.hidden_size {
        keys.remove("head_dim");
    }
}

/// Writes the keys that all relatives of Llama have.
pub(super) fn write(decoder: &DecoderConfig) -> Map<String, Value> {
    map(json!({
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_hidden_layers,
        "num_attention_heads": decoder.num_attention_heads,
        "num_key_value_heads": decoder.num_key_value_heads,
        "head_dim": decoder.head_dim,
        "max_position_embeddings": decoder.max_position_embeddings,
        "tie_word_embeddings": decoder.tie_word_embeddings,
        "rope_theta": decoder.rope_theta,
        "rope_scaling": rope_keys::write(decoder.rope_scaling.as_ref()),
        "rms_norm_eps": decoder.norm_eps,
        "hidden_act": "silu",
    }))
}

//! Qwen 2 and Qwen 3, dense and with experts.

use serde_json::{Map, Value, json};

use super::{Family, Keys, llama};
use crate::{ArchError, DecoderConfig, MoeConfig, QkNorm};

pub(super) const QWEN2: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    read: read_qwen2,
    write: llama::write,
};

pub(super) const QWEN3: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    read: read_qwen3,
    write: llama::write,
};

pub(super) const QWEN2_MOE: Family = Family {
    model_type: "qwen2_moe",
    architecture: "Qwen2MoeForCausalLM",
    read: read_qwen2_moe,
    write: write_qwen2_moe,
};

pub(super) const QWEN3_MOE: Family = Family {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    read: read_qwen3_moe,
    write: write_moe,
};

fn read_qwen2(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    Ok(DecoderConfig {
        attention_bias: true,
        ..llama::read(keys)?
    })
}

fn read_qwen3(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    keys.refuse_unless(&[("attention_bias", json!(false))])?;
    Ok(DecoderConfig {
        qk_norm: Some(QkNorm::Head),
        ..llama::read(keys)?
    })
}

fn read_qwen2_moe(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    Ok(DecoderConfig {
        moe: Some(MoeConfig {
            n_shared_experts: 1,
            shared_expert_intermediate_size: Some(keys.need("shared_expert_intermediate_size")?),
            has_shared_gate: true,
            ..read_experts(keys)?
        }),
        ..read_qwen2(keys)?
    })
}

fn read_qwen3_moe(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    Ok(DecoderConfig {
        moe: Some(read_experts(keys)?),
        ..read_qwen3(keys)?
    })
}

fn read_experts(keys: &Keys) -> Result<MoeConfig, ArchError> {
    keys.refuse_unless(&[("decoder_sparse_step", json!(1))])?;
    let dense = keys
        .array("mlp_only_layers")?
        .map_or(&[][..], Vec::as_slice);
    let is_leading = dense
        .iter()
        .enumerate()
        .all(|(index, layer)| *layer == json!(index));
    if !is_leading {
        let what = format!("mlp_only_layers = {}", json!(dense));
        return Err(ArchError::contradiction(
            what,
            "only leading blocks may be dense",
        ));
    }
    let num_experts = match keys.number("num_experts")? {
        Some(number) => number,
        None => keys.need("num_local_experts")?,
    };
    Ok(MoeConfig {
        first_k_dense_replace: dense.len(),
        norm_topk_prob: keys.flag("norm_topk_prob")?.unwrap_or(false),
        ..MoeConfig::plain(
            num_experts,
            keys.need("num_experts_per_tok")?,
            keys.need("moe_intermediate_size")?,
        )
    })
}

fn write_moe(decoder: &DecoderConfig) -> Map<String, Value> {
    let mut keys = llama::write(decoder);
    if let Some(moe) = &decoder.moe {
        let dense: Vec<usize> = (0..moe.first_k_dense_replace).collect();
        for (key, value) in [
            ("num_experts", json!(moe.num_experts)),
            ("num_experts_per_tok", json!(moe.num_experts_per_tok)),
            ("moe_intermediate_size", json!(moe.moe_intermediate_size)),
            ("norm_topk_prob", json!(moe.norm_topk_prob)),
            ("decoder_sparse_step", json!(1)),
            ("mlp_only_layers", json!(dense)),
        ] {
            keys.insert(key.to_owned(), value);
        }
    }
    keys
}

fn write_qwen2_moe(decoder: &DecoderConfig) -> Map<String, Value> {
    let mut keys = write_moe(decoder);
    let shared = decoder.moe.as_ref().map(MoeConfig::shared_width);
    keys.insert("shared_expert_intermediate_size".to_owned(), json!(shared));
    keys
}

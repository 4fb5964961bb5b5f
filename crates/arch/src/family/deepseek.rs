//! DeepSeek-V2 and V3: latent attention, and experts with shared ones.

use serde_json::{Map, Value, json};

use super::{Family, Keys, llama};
use crate::{
    ArchError, BIAS_UPDATE_RATE, DecoderConfig, GroupScore, LatentAttention, MoeConfig,
    RoutingGroups, ScoringFunc,
};

pub(super) const DEEPSEEK_V2: Family = Family {
    model_type: "deepseek_v2",
    architecture: "DeepseekV2ForCausalLM",
    read: read_v2,
    write: write_v2,
};

pub(super) const DEEPSEEK_V3: Family = Family {
    model_type: "deepseek_v3",
    architecture: "DeepseekV3ForCausalLM",
    read: read_v3,
    write: write_v3,
};

/// What a version has if its file does not say otherwise.
struct Defaults {
    n_shared_experts: usize,
    first_k_dense_replace: usize,
    norm_topk_prob: bool,
    routed_scaling_factor: f64,
}

const V2: Defaults = Defaults {
    n_shared_experts: 2,
    first_k_dense_replace: 0,
    norm_topk_prob: false,
    routed_scaling_factor: 1.0,
};

const V3: Defaults = Defaults {
    n_shared_experts: 1,
    first_k_dense_replace: 3,
    norm_topk_prob: true,
    routed_scaling_factor: 2.5,
};

/// What both versions have.
fn read(keys: &Keys, defaults: &Defaults) -> Result<DecoderConfig, ArchError> {
    keys.refuse_unless(&[
        ("moe_layer_freq", json!(1)),
        ("rope_interleave", json!(true)),
        ("attention_bias", json!(false)),
        ("mlp_bias", json!(false)),
    ])?;
    let latent = LatentAttention {
        q_lora_rank: keys.number("q_lora_rank")?,
        kv_lora_rank: keys.need("kv_lora_rank")?,
        qk_nope_head_dim: keys.need("qk_nope_head_dim")?,
        qk_rope_head_dim: keys.need("qk_rope_head_dim")?,
        v_head_dim: keys.need("v_head_dim")?,
    };
    let routed = MoeConfig::plain(
        keys.need("n_routed_experts")?,
        keys.need("num_experts_per_tok")?,
        keys.need("moe_intermediate_size")?,
    );
    Ok(DecoderConfig {
        head_dim: latent.qk_head_dim(),
        latent: Some(latent),
        moe: Some(MoeConfig {
            n_shared_experts: keys
                .number("n_shared_experts")?
                .unwrap_or(defaults.n_shared_experts),
            first_k_dense_replace: keys
                .number("first_k_dense_replace")?
                .unwrap_or(defaults.first_k_dense_replace),
            norm_topk_prob: keys
                .flag("norm_topk_prob")?
                .unwrap_or(defaults.norm_topk_prob),
            routed_scaling_factor: keys
                .float("routed_scaling_factor")?
                .unwrap_or(defaults.routed_scaling_factor),
            ..routed
        }),
        ..llama::read(keys)?
    })
}

/// The groups of experts, unless all are in one; `usual` are the numbers of files without them.
fn groups(
    keys: &Keys,
    usual: [usize; 2],
    score: GroupScore,
) -> Result<Option<RoutingGroups>, ArchError> {
    let groups = RoutingGroups {
        n_group: keys.number("n_group")?.unwrap_or(usual[0]),
        topk_group: keys.number("topk_group")?.unwrap_or(usual[1]),
        score,
    };
    Ok((groups.n_group > 1).then_some(groups))
}

fn read_v2(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    let groups = match keys.text("topk_method")? {
        None | Some("greedy") => None,
        Some("group_limited_greedy") => groups(keys, [1, 1], GroupScore::Best)?,
        Some(other) => return Err(ArchError::not_built(format!("topk_method = {other:?}"))),
    };
    let decoder = read(keys, &V2)?;
    Ok(DecoderConfig {
        moe: decoder.moe.map(|moe| MoeConfig { groups, ..moe }),
        ..decoder
    })
}

fn read_v3(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    let groups = groups(keys, [8, 4], GroupScore::BestTwo)?;
    let decoder = read(keys, &V3)?;
    Ok(DecoderConfig {
        moe: decoder.moe.map(|moe| MoeConfig {
            groups,
            scoring_func: ScoringFunc::Sigmoid,
            bias_update_rate: Some(BIAS_UPDATE_RATE),
            ..moe
        }),
        ..decoder
    })
}

fn write_v2(decoder: &DecoderConfig) -> Map<String, Value> {
    let mut keys = write(decoder);
    let has_groups = decoder.moe.as_ref().is_some_and(|moe| moe.groups.is_some());
    let method = if has_groups {
        "group_limited_greedy"
    } else {
        "greedy"
    };
    keys.insert("topk_method".to_owned(), json!(method));
    keys
}

fn write_v3(decoder: &DecoderConfig) -> Map<String, Value> {
    let mut keys = write(decoder);
    keys.insert("rope_interleave".to_owned(), json!(true));
    keys
}

fn write(decoder: &DecoderConfig) -> Map<String, Value> {
    let mut keys = llama::write(decoder);
    keys.remove("head_dim");
    if let (Some(latent), Some(moe)) = (&decoder.latent, &decoder.moe) {
        for (key, value) in [
            ("q_lora_rank", json!(latent.q_lora_rank)),
            ("kv_lora_rank", json!(latent.kv_lora_rank)),
            ("qk_nope_head_dim", json!(latent.qk_nope_head_dim)),
            ("qk_rope_head_dim", json!(latent.qk_rope_head_dim)),
            ("v_head_dim", json!(latent.v_head_dim)),
            ("n_routed_experts", json!(moe.num_experts)),
            (
                "n_group",
                json!(moe.groups.map_or(1, |groups| groups.n_group)),
            ),
            (
                "topk_group",
                json!(moe.groups.map_or(1, |groups| groups.topk_group)),
            ),
            ("n_shared_experts", json!(moe.n_shared_experts)),
            ("num_experts_per_tok", json!(moe.num_experts_per_tok)),
            ("moe_intermediate_size", json!(moe.moe_intermediate_size)),
            ("first_k_dense_replace", json!(moe.first_k_dense_replace)),
            ("norm_topk_prob", json!(moe.norm_topk_prob)),
            ("routed_scaling_factor", json!(moe.routed_scaling_factor)),
            ("moe_layer_freq", json!(1)),
        ] {
            keys.insert(key.to_owned(), value);
        }
    }
    keys
}

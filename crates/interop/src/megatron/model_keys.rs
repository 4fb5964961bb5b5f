//! The model of Megatron-LM's flags, as keys of `[model]`.

use super::super::{FrameworkError, Outcome};
use super::flags::Flags;
use trainyard_arch::{DecoderConfig, FeedForward, MoeConfig, Norm, Positions};

/// The flags that describe a model.
const FLAGS: [&str; 44] = [
    "--num-layers",
    "--hidden-size",
    "--ffn-hidden-size",
    "--num-attention-heads",
    "--group-query-attention",
    "--num-query-groups",
    "--kv-channels",
    "--max-position-embeddings",
    "--vocab-size",
    "--padded-vocab-size",
    "--make-vocab-size-divisible-by",
    "--swiglu",
    "--normalization",
    "--norm-epsilon",
    "--position-embedding-type",
    "--use-rotary-position-embeddings",
    "--rotary-base",
    "--disable-bias-linear",
    "--add-qkv-bias",
    "--qk-layernorm",
    "--untie-embeddings-and-output-weights",
    "--hidden-dropout",
    "--attention-dropout",
    "--init-method-std",
    "--multi-latent-attention",
    "--q-lora-rank",
    "--kv-lora-rank",
    "--qk-head-dim",
    "--qk-pos-emb-head-dim",
    "--v-head-dim",
    "--num-experts",
    "--moe-router-topk",
    "--moe-ffn-hidden-size",
    "--moe-shared-expert-intermediate-size",
    "--moe-shared-expert-gate",
    "--moe-layer-freq",
    "--moe-router-enable-expert-bias",
    "--moe-router-bias-update-rate",
    "--moe-router-score-function",
    "--moe-router-topk-scaling-factor",
    "--moe-aux-loss-coeff",
    "--moe-z-loss-coeff",
    "--moe-expert-capacity-factor",
    "--openai-gelu",
];

pub(super) fn is_flag(flag: &str) -> bool {
    FLAGS.contains(&flag)
}

/// The keys of the model, or why Trainyard has none like it.
pub(super) fn outcome(flags: &Flags, shape: &DecoderConfig) -> Result<Outcome, FrameworkError> {
    let is_llama = shape.feed_forward == FeedForward::Gated
        && shape.norm == Norm::RootMeanSquare
        && shape.positions == Positions::Rotary
        && !shape.has_biases
        && shape.latent.is_none();
    let mut settings = sizes(shape);
    if is_llama {
        llama(flags, shape, &mut settings);
    } else if shape.is_gpt2() && shape.moe.is_none() {
        settings.push(("model.name", "gpt2".to_owned()));
        let epsilon = flags.get("--norm-epsilon");
        settings.extend(epsilon.map(|value| ("model.layer_norm_epsilon", value)));
    } else {
        return Ok(Outcome::rejected(
            "the model is neither a Llama nor a GPT-2",
            "use --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear for a Llama, \
             none of them for a GPT-2, or give a CONFIG.toml with model.hf_assets_path",
        ));
    }
    if let Some(experts) = &shape.moe {
        match experts_of(flags, experts) {
            Some(keys) => settings.extend(keys),
            None => {
                return Ok(Outcome::rejected(
                    "shared experts are as wide as the routed ones, and have no gate",
                    "use a multiple of --moe-ffn-hidden-size for --moe-shared-expert-intermediate-size",
                ));
            }
        }
    }
    Ok(Outcome::set_all(settings))
}

fn sizes(shape: &DecoderConfig) -> Vec<(&'static str, String)> {
    let sizes = [
        ("model.vocab_size", shape.vocab_size),
        ("model.hidden_size", shape.hidden_size),
        ("model.intermediate_size", shape.intermediate_size),
        ("model.num_hidden_layers", shape.num_hidden_layers),
        ("model.num_attention_heads", shape.num_attention_heads),
        (
            "model.max_position_embeddings",
            shape.max_position_embeddings,
        ),
    ];
    let mut settings: Vec<(&str, String)> = sizes
        .into_iter()
        .map(|(key, size)| (key, size.to_string()))
        .collect();
    settings.push((
        "model.tie_word_embeddings",
        shape.tie_word_embeddings.to_string(),
    ));
    settings
}

fn llama(flags: &Flags, shape: &DecoderConfig, settings: &mut Vec<(&'static str, String)>) {
    // Megatron's defaults.
    let theta = flags.get("--rotary-base");
    let epsilon = flags.get("--norm-epsilon");
    settings.extend([
        ("model.name", "llama".to_owned()),
        (
            "model.num_key_value_heads",
            shape.num_key_value_heads.to_string(),
        ),
        ("model.head_dim", shape.head_dim.to_string()),
        ("model.attention_bias", shape.attention_bias.to_string()),
        ("model.qk_norm", shape.qk_norm.is_some().to_string()),
        (
            "model.rope_theta",
            theta.unwrap_or_else(|| "10000".to_owned()),
        ),
        (
            "model.rms_norm_eps",
            epsilon.unwrap_or_else(|| "1e-5".to_owned()),
        ),
    ]);
}

fn experts_of(flags: &Flags, experts: &MoeConfig) -> Option<Vec<(&'static str, String)>> {
    let (width, shared) = (experts.moe_intermediate_size, experts.shared_width());
    if experts.has_shared_gate || width == 0 || !shared.is_multiple_of(width) {
        return None;
    }
    let mut settings = vec![
        ("model.moe.num_experts", experts.num_experts.to_string()),
        (
            "model.moe.num_experts_per_tok",
            experts.num_experts_per_tok.to_string(),
        ),
        ("model.moe.moe_intermediate_size", width.to_string()),
        ("model.moe.n_shared_experts", (shared / width).to_string()),
        (
            "model.moe.first_k_dense_replace",
            experts.first_k_dense_replace.to_string(),
        ),
    ];
    for (flag, key) in [
        ("--moe-router-score-function", "model.moe.scoring_func"),
        (
            "--moe-router-topk-scaling-factor",
            "model.moe.routed_scaling_factor",
        ),
        ("--moe-aux-loss-coeff", "model.moe.router_aux_loss_coef"),
        ("--moe-z-loss-coeff", "model.moe.router_z_loss_coef"),
        ("--moe-expert-capacity-factor", "model.moe.capacity_factor"),
    ] {
        settings.extend(flags.get(flag).map(|value| (key, value)));
    }
    if experts.bias_update_rate.is_some() {
        let rate = flags.get("--moe-router-bias-update-rate");
        let rate = rate.unwrap_or_else(|| "0.001".to_owned());
        settings.push(("model.moe.bias_update_rate", rate));
    }
    Some(settings)
}

#[cfg(test)]
mod tests {
    use super::super::flags::arity;
    use super::*;

    #[test]
    fn every_flag_exists() {
        for flag in FLAGS {
            assert!(arity(flag).is_some(), "{flag}");
        }
    }
}

//! The models that torchtitan registers, as keys of `[model]`.

use super::flavors::{FLAVORS, Flavor};

/// torchtitan's update rate of the expert bias.
const BIAS_UPDATE_RATE: &str = "0.001";

/// The keys of a flavor for sequences of this length.
pub(super) fn settings(flavor: &Flavor, seq_len: usize) -> Vec<(&'static str, String)> {
    let shape = flavor.shape(seq_len);
    let is_qwen = flavor.module == "qwen3";
    let theta = match (is_qwen, flavor.name) {
        (true, "235B-A22B") => "5000000",
        (true, _) => "1000000",
        (false, _) => "500000",
    };
    let text = |value: usize| value.to_string();
    let mut settings = vec![
        ("model.name", "llama".to_owned()),
        ("model.vocab_size", text(shape.vocab_size)),
        ("model.hidden_size", text(shape.hidden_size)),
        ("model.intermediate_size", text(shape.intermediate_size)),
        ("model.num_hidden_layers", text(shape.num_hidden_layers)),
        ("model.num_attention_heads", text(shape.num_attention_heads)),
        ("model.num_key_value_heads", text(shape.num_key_value_heads)),
        ("model.head_dim", text(shape.head_dim)),
        ("model.max_position_embeddings", text(seq_len)),
        ("model.rope_theta", theta.to_owned()),
        (
            "model.rms_norm_eps",
            if is_qwen { "1e-6" } else { "1e-5" }.to_owned(),
        ),
        (
            "model.tie_word_embeddings",
            shape.tie_word_embeddings.to_string(),
        ),
        ("model.qk_norm", shape.qk_norm.is_some().to_string()),
    ];
    if !is_qwen {
        settings.extend([
            ("model.rope_scaling.rope_type", "llama3".to_owned()),
            ("model.rope_scaling.factor", "8".to_owned()),
            ("model.rope_scaling.low_freq_factor", "1".to_owned()),
            ("model.rope_scaling.high_freq_factor", "4".to_owned()),
            (
                "model.rope_scaling.original_max_position_embeddings",
                "8192".to_owned(),
            ),
        ]);
    }
    if let Some(experts) = &shape.moe {
        settings.extend([
            ("model.moe.num_experts", text(experts.num_experts)),
            (
                "model.moe.num_experts_per_tok",
                text(experts.num_experts_per_tok),
            ),
            (
                "model.moe.moe_intermediate_size",
                text(experts.moe_intermediate_size),
            ),
            ("model.moe.bias_update_rate", BIAS_UPDATE_RATE.to_owned()),
        ]);
    }
    settings
}

/// The names of all flavors.
pub(super) fn names() -> String {
    let names: Vec<String> = FLAVORS
        .iter()
        .map(|flavor| format!("{} {}", flavor.module, flavor.name))
        .collect();
    names.join(", ")
}

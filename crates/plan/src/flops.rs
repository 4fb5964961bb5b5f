//! Operations of a step, as publications count them.

use crate::{Recompute, Shape, Strategy};

/// Operations of a step that a model needs, on all ranks: forward and twice that for backward. Attention
/// is counted in full, though half of it is masked, as publications do.
pub fn model_flops(shape: &Shape, strategy: &Strategy) -> f64 {
    let tokens = (strategy.global_batch * strategy.seq_len) as f64;
    6.0 * tokens * (matrix_weights(shape) + attention_weights(shape, strategy.seq_len))
}

/// The same with what is computed again. Attention that is computed again counts as Korthikanti et al.
/// count it: as much again as in the model.
pub fn hardware_flops(shape: &Shape, strategy: &Strategy) -> f64 {
    let tokens = (strategy.global_batch * strategy.seq_len) as f64;
    let attention = 6.0 * tokens * attention_weights(shape, strategy.seq_len);
    let model = model_flops(shape, strategy);
    match strategy.recompute {
        Recompute::None => model,
        Recompute::Selective => model + attention,
        Recompute::Products => {
            let heads = shape.num_attention_heads + shape.num_key_value_heads;
            let inside = heads * shape.head_dim + shape.intermediate_size;
            let again = shape.num_hidden_layers * shape.hidden_size * inside;
            model + 2.0 * tokens * again as f64
        }
        Recompute::Full => {
            let head = (shape.hidden_size * shape.vocab_size) as f64;
            let blocks = matrix_weights(shape) - head;
            model + 2.0 * tokens * blocks + attention / 3.0
        }
    }
}

/// The share of the peak that the model's operations are.
pub fn model_flops_utilization(shape: &Shape, strategy: &Strategy, seconds: f64, peak: f64) -> f64 {
    model_flops(shape, strategy) / (seconds * peak)
}

/// The share of the peak that all operations are.
pub fn hardware_flops_utilization(
    shape: &Shape,
    strategy: &Strategy,
    seconds: f64,
    peak: f64,
) -> f64 {
    hardware_flops(shape, strategy) / (seconds * peak)
}

/// Operations of matrix products alone, forward and backward, for that many tokens.
pub(crate) fn matrix_flops(shape: &Shape, num_tokens: usize) -> f64 {
    6.0 * num_tokens as f64 * matrix_weights(shape)
}

/// Elements of matrices that each token is multiplied with, the head among them.
fn matrix_weights(shape: &Shape) -> f64 {
    let hidden = shape.hidden_size as u64;
    let attention = attention_matrices(shape);
    let dense = attention + shape.feed_forward_weights(shape.intermediate_size);
    let num_sparse = shape.num_expert_layers() as u64;
    let num_dense = shape.num_hidden_layers as u64 - num_sparse;
    let sparse = shape.experts.as_ref().map_or(0, |experts| {
        let routed = shape.feed_forward_weights(experts.moe_intermediate_size);
        let shared = experts.num_shared_experts * experts.shared_intermediate_size;
        attention
            + experts.num_experts_per_tok as u64 * routed
            + shape.feed_forward_weights(shared)
            + experts.num_experts as u64 * hidden
    });
    let head = hidden * shape.vocab_size as u64;
    (num_dense * dense + num_sparse * sparse + head) as f64
}

fn attention_matrices(shape: &Shape) -> u64 {
    let mut plain = shape.clone();
    plain.has_biases = false;
    plain.attention_bias = false;
    plain.intermediate_size = 0;
    plain.dense_block().shared
        + shape.latent.as_ref().map_or(0, |latent| {
            let narrow = latent.q_lora_rank.unwrap_or(0) + latent.kv_lora_rank;
            (shape.hidden_size * (narrow + latent.qk_rope_head_dim)) as u64
        })
}

/// The same for attention's two products, masked halves counted as publications do: `s` keys per query,
/// of which Megatron's formula `s/6h` counts `2 · s · h / 2`.
fn attention_weights(shape: &Shape, seq_len: usize) -> f64 {
    let (key, value) = match &shape.latent {
        Some(latent) => (
            latent.qk_nope_head_dim + latent.qk_rope_head_dim,
            latent.v_head_dim,
        ),
        None => (shape.head_dim, shape.head_dim),
    };
    let width = (shape.num_attention_heads * (key + value)) as f64;
    shape.num_hidden_layers as f64 * width * seq_len as f64
}

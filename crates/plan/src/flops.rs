//! Floating-point operations of a step, counted as publications do.

use crate::{Recompute, Shape, Strategy};

/// Model FLOPs of a step over all ranks: the forward pass, and twice that for the backward pass. Attention counts
/// in full although half of it is masked, as publications do.
pub fn model_flops(shape: &Shape, strategy: &Strategy) -> f64 {
    let tokens = (strategy.global_batch * strategy.seq_len) as f64;
    6.0 * tokens * (matrix_weights(shape) + attention_weights(shape, strategy.seq_len))
}

/// Hardware FLOPs of a step: model FLOPs plus recomputation. Recomputed attention counts as Korthikanti et al.
/// count it: as much again as in the model.
pub fn hardware_flops(shape: &Shape, strategy: &Strategy) -> f64 {
    let tokens = (strategy.global_batch * strategy.seq_len) as f64;
    let attention = 6.0 * tokens * attention_weights(shape, strategy.seq_len);
    let model = model_flops(shape, strategy);
    match strategy.recompute {
        Recompute::None => model,
        Recompute::Selective => model + attention,
        Recompute::SelectiveOp => {
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

/// Model FLOPs utilization (MFU): the fraction of peak that model FLOPs reach.
pub fn model_flops_utilization(shape: &Shape, strategy: &Strategy, seconds: f64, peak: f64) -> f64 {
    model_flops(shape, strategy) / (seconds * peak)
}

/// Hardware FLOPs utilization (HFU): the fraction of peak that all FLOPs reach.
pub fn hardware_flops_utilization(
    shape: &Shape,
    strategy: &Strategy,
    seconds: f64,
    peak: f64,
) -> f64 {
    hardware_flops(shape, strategy) / (seconds * peak)
}

/// FLOPs of the matrix products alone, forward and backward, for `num_tokens` tokens.
pub(crate) fn matrix_flops(shape: &Shape, num_tokens: usize) -> f64 {
    6.0 * num_tokens as f64 * matrix_weights(shape)
}

/// Weights that each token is multiplied with, including the output head.
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
    plain.dense_block().sharded
        + shape.latent.as_ref().map_or(0, |latent| {
            let narrow = latent.q_lora_rank.unwrap_or(0) + latent.kv_lora_rank;
            (shape.hidden_size * (narrow + latent.qk_rope_head_dim)) as u64
        })
}

/// The equivalent number of weights of attention's two products, masked half included: `s` keys per query, of which
/// Megatron's term `s/6h` counts `2 · s · h / 2`.
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

//! Floating-point operations of a step, counted as publications do.

use crate::{Recompute, Strategy};
use trainyard_arch::DecoderConfig;

/// Model FLOPs of a step over all ranks: the forward pass, and twice that for the backward pass. Attention counts
/// in full although half of it is masked, as publications do.
pub fn model_flops(shape: &DecoderConfig, strategy: &Strategy) -> f64 {
    let tokens = (strategy.global_batch * strategy.seq_len) as f64;
    tokens * shape.flops_per_token(strategy.seq_len)
}

/// Hardware FLOPs of a step: model FLOPs plus recomputation. Recomputed attention counts as Korthikanti et al.
/// count it: as much again as in the model.
pub fn hardware_flops(shape: &DecoderConfig, strategy: &Strategy) -> f64 {
    let tokens = (strategy.global_batch * strategy.seq_len) as f64;
    let attention = 6.0 * tokens * shape.attention_weights(strategy.seq_len);
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
            let blocks = shape.matrix_weights() as f64 - head;
            model + 2.0 * tokens * blocks + attention / 3.0
        }
    }
}

/// Model FLOPs utilization (MFU): the fraction of peak that model FLOPs reach.
pub fn model_flops_utilization(
    shape: &DecoderConfig,
    strategy: &Strategy,
    seconds: f64,
    peak: f64,
) -> f64 {
    model_flops(shape, strategy) / (seconds * peak)
}

/// Hardware FLOPs utilization (HFU): the fraction of peak that all FLOPs reach.
pub fn hardware_flops_utilization(
    shape: &DecoderConfig,
    strategy: &Strategy,
    seconds: f64,
    peak: f64,
) -> f64 {
    hardware_flops(shape, strategy) / (seconds * peak)
}

/// FLOPs of the matrix products alone, forward and backward, for `num_tokens` tokens.
pub(crate) fn matrix_flops(decoder: &DecoderConfig, num_tokens: usize) -> f64 {
    6.0 * num_tokens as f64 * decoder.matrix_weights() as f64
}

//! Activation memory: the bytes that the backward pass needs from the forward pass.
//!
//! Counted tensor by tensor. For a plain GPT block with dropout and materialized attention scores the sum is `sbh
//! (10 + 24/t + 5as/ht)`, as in Korthikanti et al.; for a block with gated feed-forward, grouped-query attention
//! and flash attention it is `sb/t (8h + 4ad + 4gd + 6f)` plus the softmax statistics.

use crate::{AttentionKernel, LocalParameters, Operators, Recompute, Software, Strategy};
use trainyard_arch::{BlockKind, DecoderConfig, FeedForward};

/// Activation bytes of one block for one micro-batch on one rank.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct BlockActivations {
    /// The block's input.
    pub input: f64,
    /// Everything except attention scores.
    pub matrices: f64,
    /// Attention scores, or the softmax statistics of flash attention.
    pub scores: f64,
    /// What selective-op recomputation saves.
    pub selective_op: f64,
    /// Copies of the weights in the compute type, if the weights have another.
    pub casts: f64,
    /// Gradients of activations and weights that exist at once in the block's backward pass.
    pub gradients: f64,
    /// Inputs of matrix products and gradients of their results, which a deferred weight gradient needs.
    pub products: f64,
}

impl BlockActivations {
    /// The activations of a block of this kind.
    pub fn of(
        shape: &DecoderConfig,
        strategy: &Strategy,
        software: &Software,
        kind: BlockKind,
    ) -> Self {
        let tokens = tokens(strategy);
        let tp = strategy.degrees.tp as f64;
        let between = strategy.shards_between_products();
        let bytes = strategy.precision.compute as f64;
        let hidden = shape.hidden_size as f64;
        let mask = if software.dropout { 1.0 } else { 0.0 };
        // Inputs of two norms and two dropout masks; inputs of attention and of the feed-forward layer.
        let norms = hidden * 2.0 * (bytes + mask) / between
            + hidden * 2.0 * bytes / strategy.shards_of_inputs(software);
        let inner = match kind {
            BlockKind::Experts => expert_width(shape, software, bytes) / tp,
            BlockKind::Dense => {
                feed_forward_width(shape, software, shape.intermediate_size) * bytes / tp
            }
        };
        let attention = attention_width(shape, strategy, software) * bytes / tp
            + latent_width(shape) * bytes / between;
        let parameters = LocalParameters::of_block(shape, strategy, kind).total();
        let scores = tokens * scores_width(shape, strategy, software) / tp;
        BlockActivations {
            input: tokens * hidden * bytes / between,
            matrices: tokens * (norms + attention + inner),
            scores,
            selective_op: tokens * selective_op_width(shape, strategy) * bytes + scores,
            casts: parameters * strategy.precision.cast() as f64,
            gradients: gradients(shape, strategy, kind),
            products: tokens * products_width(shape, strategy, software, kind) * bytes,
        }
    }

    /// Bytes saved until the backward pass.
    pub const fn saved(&self, recompute: Recompute) -> f64 {
        match recompute {
            Recompute::None => self.matrices + self.scores + self.casts,
            Recompute::Selective => self.matrices + self.casts,
            Recompute::SelectiveOp => self.selective_op + self.casts,
            Recompute::Full => self.input,
        }
    }

    /// Bytes held from the backward pass for the input to that for the weights, if a schedule splits them.
    pub const fn deferred(&self) -> f64 {
        self.products + self.casts
    }

    /// Bytes that exist only while one block runs its backward pass: what it recomputes, and gradients inside it.
    pub const fn backward(&self, recompute: Recompute) -> f64 {
        self.gradients
            + match recompute {
                Recompute::None => 0.0,
                Recompute::Selective => self.scores,
                // The last matrix product is saved although the backward pass does not need it.
                Recompute::SelectiveOp => {
                    (self.matrices + self.scores - self.selective_op).max(0.0)
                }
                Recompute::Full => self.matrices + self.scores + self.casts - self.input,
            }
    }
}

/// Tokens of a micro-batch on one rank.
pub(crate) fn tokens(strategy: &Strategy) -> f64 {
    (strategy.micro_batch * strategy.seq_len) as f64 / strategy.degrees.cp as f64
}

/// Elements per token of the inputs of a block's matrix products and of the gradients of their results.
fn products_width(
    shape: &DecoderConfig,
    strategy: &Strategy,
    software: &Software,
    kind: BlockKind,
) -> f64 {
    let tp = strategy.degrees.tp as f64;
    let hidden = shape.hidden_size as f64;
    // Inputs of attention and of the feed-forward layer, and gradients of their results.
    let outside = 4.0 * hidden / strategy.shards_of_inputs(software);
    let attention = 2.0 * (shape.query_width() + shape.key_value_width()) as f64;
    let feed_forward = match (kind, &shape.moe) {
        (BlockKind::Experts, Some(experts)) => {
            let rows = experts.num_experts_per_tok as f64;
            rows * (3.0 * experts.moe_intermediate_size as f64 + 2.0 * hidden)
                + 3.0 * experts.shared_width() as f64
        }
        _ => match shape.feed_forward {
            FeedForward::Gated => 3.0 * shape.intermediate_size as f64,
            FeedForward::Plain => 2.0 * shape.intermediate_size as f64,
        },
    };
    outside + (attention + feed_forward) / tp
}

/// Gradients that exist at once where a block's backward pass needs most: in its feed-forward layer.
fn gradients(shape: &DecoderConfig, strategy: &Strategy, kind: BlockKind) -> f64 {
    let precision = &strategy.precision;
    let (bytes, tp) = (precision.compute as f64, strategy.degrees.tp as f64);
    let (tokens, hidden) = (tokens(strategy), shape.hidden_size as f64);
    if let (BlockKind::Experts, Some(experts)) = (kind, &shape.moe) {
        let rows = tokens * experts.num_experts_per_tok as f64;
        let width = experts.moe_intermediate_size as f64;
        // Rows on their way back from the experts, or those inside of them.
        return rows * (2.0 * hidden).max(3.0 * width) * bytes / tp;
    }
    let width = shape.intermediate_size as f64 / tp;
    let casts = match precision.cast() {
        0 => 0.0,
        _ => precision.gradient as f64,
    };
    match shape.feed_forward {
        // The gate and the other factor, their weights, and the input.
        FeedForward::Gated => {
            tokens * (hidden + 2.0 * width) * bytes + hidden * width * (2.0 * bytes + casts)
        }
        FeedForward::Plain => tokens * (hidden + width) * bytes + hidden * width * (bytes + casts),
    }
}

/// Elements that a feed-forward layer saves per token between its matrices.
fn feed_forward_width(shape: &DecoderConfig, software: &Software, width: usize) -> f64 {
    let saved = match (shape.feed_forward, software.operators) {
        // The gate, its activation, the other factor and their product.
        (FeedForward::Gated, Operators::Eager) => 4.0,
        (FeedForward::Gated, Operators::Fused) => 3.0,
        (FeedForward::Plain, _) => 2.0,
    };
    saved * width as f64
}

/// Bytes that routed and shared experts save per token. A routed token is copied to its expert and comes back to be
/// weighted, and the router saves a probability per expert.
fn expert_width(shape: &DecoderConfig, software: &Software, bytes: f64) -> f64 {
    let Some(experts) = &shape.moe else {
        return feed_forward_width(shape, software, shape.intermediate_size) * bytes;
    };
    let routed = feed_forward_width(shape, software, experts.moe_intermediate_size);
    let copies = 2.0 * shape.hidden_size as f64;
    let shared = experts.shared_width();
    bytes * experts.num_experts_per_tok as f64 * (routed + copies)
        + bytes * feed_forward_width(shape, software, shared)
        + 4.0 * experts.num_experts as f64
}

/// Elements of queries, keys, values and the output projection's input, per token.
fn attention_width(shape: &DecoderConfig, strategy: &Strategy, software: &Software) -> f64 {
    let heads = shape.num_attention_heads as f64;
    if let Some(latent) = &shape.latent {
        let head = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) as f64;
        let value = latent.v_head_dim as f64;
        return heads
            * match software.operators {
                // Flash attention takes heads of one size only, so values and the output are padded.
                Operators::Eager => 4.0 * head + value,
                Operators::Fused => 2.0 * head + 2.0 * value,
            };
    }
    let query = shape.query_width() as f64;
    let key_value = 2.0 * shape.key_value_width() as f64;
    let normed = if shape.qk_norm.is_some() {
        query + key_value / 2.0
    } else {
        0.0
    };
    // Without 16-bit numbers no kernel reads a key-value head for several query heads: each of these gets a copy.
    let is_copied = software.operators == Operators::Eager && strategy.precision.compute > 2;
    let key_value = if is_copied { 2.0 * query } else { key_value };
    2.0 * query + key_value + normed
}

/// Elements that torchtitan's selective-op recomputation saves of a dense block, per token: the input, every second
/// matrix product (queries, values, gate, output), attention's output, and the results of tensor-parallel
/// reductions.
fn selective_op_width(shape: &DecoderConfig, strategy: &Strategy) -> f64 {
    let tp = strategy.degrees.tp as f64;
    let between = strategy.shards_between_products();
    let hidden = shape.hidden_size as f64;
    let query = (shape.num_attention_heads * shape.head_dim) as f64;
    let value = (shape.num_key_value_heads * shape.head_dim) as f64;
    let output = match shape.feed_forward {
        FeedForward::Gated => hidden,
        FeedForward::Plain => 0.0,
    };
    let reduced = if tp > 1.0 {
        2.0 * hidden / between
    } else {
        0.0
    };
    let inside = 2.0 * query + value + shape.intermediate_size as f64;
    hidden / between + inside / tp + output + reduced
}

/// Elements of the latents and of what their norms save, per token.
fn latent_width(shape: &DecoderConfig) -> f64 {
    shape.latent.as_ref().map_or(0.0, |latent| {
        let query = latent.q_lora_rank.unwrap_or(0);
        (2 * query + 2 * latent.kv_lora_rank + latent.qk_rope_head_dim) as f64
    })
}

/// Bytes per query token: the softmax output, with dropout also its mask and result; with flash attention one fp32
/// statistic.
fn scores_width(shape: &DecoderConfig, strategy: &Strategy, software: &Software) -> f64 {
    let heads = shape.num_attention_heads as f64;
    let bytes = strategy.precision.compute as f64;
    match software.attention {
        AttentionKernel::Flash => 4.0 * heads,
        AttentionKernel::Materialized => {
            let dropped = if software.dropout { 1.0 + bytes } else { 0.0 };
            heads * strategy.seq_len as f64 * (bytes + dropped)
        }
    }
}

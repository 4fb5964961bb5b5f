//! Activation memory: the bytes that the backward pass needs from the forward pass.
//!
//! Counted tensor by tensor. For a plain GPT block with dropout and materialized attention scores the sum is `sbh
//! (10 + 24/t + 5as/ht)`, as in Korthikanti et al.; for a block with gated feed-forward, grouped-query attention
//! and flash attention it is `sb/t (8h + 4ad + 4gd + 6f)` plus the softmax statistics.

use crate::{AttentionKernel, Recompute, Software, Strategy};
use trainyard_arch::{DecoderConfig, FeedForward};

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
}

impl BlockActivations {
    /// The activations of a block, with experts if `sparse`.
    pub fn of(
        shape: &DecoderConfig,
        strategy: &Strategy,
        software: &Software,
        sparse: bool,
    ) -> Self {
        let tokens = tokens(strategy);
        let tp = strategy.degrees.tp as f64;
        let between = if strategy.sequence_parallel { tp } else { 1.0 };
        let bytes = strategy.precision.compute as f64;
        let hidden = shape.hidden_size as f64;
        let mask = if software.dropout { 1.0 } else { 0.0 };
        // Inputs of two norms, of attention and of the feed-forward layer, and two dropout masks.
        let norms = hidden * (4.0 * bytes + 2.0 * mask) / between;
        let inner = if sparse {
            expert_width(shape, bytes) / tp
        } else {
            feed_forward_width(shape, shape.intermediate_size) * bytes / tp
        };
        let attention = attention_width(shape) * bytes / tp + latent_width(shape) * bytes / between;
        let scores = tokens * scores_width(shape, strategy, software) / tp;
        BlockActivations {
            input: tokens * hidden * bytes / between,
            matrices: tokens * (norms + attention + inner),
            scores,
            selective_op: tokens * selective_op_width(shape, strategy) * bytes + scores,
        }
    }

    /// Bytes saved until the backward pass.
    pub const fn saved(&self, recompute: Recompute) -> f64 {
        match recompute {
            Recompute::None => self.matrices + self.scores,
            Recompute::Selective => self.matrices,
            Recompute::SelectiveOp => self.selective_op,
            Recompute::Full => self.input,
        }
    }

    /// Bytes recomputed while one block runs its backward pass.
    pub const fn recomputed(&self, recompute: Recompute) -> f64 {
        match recompute {
            Recompute::None => 0.0,
            Recompute::Selective => self.scores,
            // The last matrix product is saved although the backward pass does not need it.
            Recompute::SelectiveOp => (self.matrices + self.scores - self.selective_op).max(0.0),
            Recompute::Full => self.matrices + self.scores,
        }
    }
}

/// Tokens of a micro-batch on one rank.
pub(crate) fn tokens(strategy: &Strategy) -> f64 {
    (strategy.micro_batch * strategy.seq_len) as f64 / strategy.degrees.cp as f64
}

/// Elements that a feed-forward layer saves per token between its matrices.
fn feed_forward_width(shape: &DecoderConfig, width: usize) -> f64 {
    let saved = match shape.feed_forward {
        FeedForward::Gated => 3.0,
        FeedForward::Plain => 2.0,
    };
    saved * width as f64
}

/// Bytes that routed and shared experts save per token. A routed token is copied to its expert and comes back to be
/// weighted, and the router saves a probability per expert.
fn expert_width(shape: &DecoderConfig, bytes: f64) -> f64 {
    let Some(experts) = &shape.moe else {
        return feed_forward_width(shape, shape.intermediate_size) * bytes;
    };
    let routed = feed_forward_width(shape, experts.moe_intermediate_size);
    let copies = 2.0 * shape.hidden_size as f64;
    let shared = experts.shared_width();
    bytes * experts.num_experts_per_tok as f64 * (routed + copies)
        + bytes * feed_forward_width(shape, shared)
        + 4.0 * experts.num_experts as f64
}

/// Elements of queries, keys, values and the output projection's input, per token.
fn attention_width(shape: &DecoderConfig) -> f64 {
    let heads = shape.num_attention_heads as f64;
    if let Some(latent) = &shape.latent {
        let head = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) as f64;
        return heads * (2.0 * head + 2.0 * latent.v_head_dim as f64);
    }
    let (query, key_value) = (
        heads * shape.head_dim as f64,
        2.0 * (shape.num_key_value_heads * shape.head_dim) as f64,
    );
    let normed = if shape.qk_norm.is_some() {
        query + key_value / 2.0
    } else {
        0.0
    };
    2.0 * query + key_value + normed
}

/// Elements that torchtitan's selective-op recomputation saves of a dense block, per token: the input, every second
/// matrix product (queries, values, gate, output), attention's output, and the results of tensor-parallel
/// reductions.
fn selective_op_width(shape: &DecoderConfig, strategy: &Strategy) -> f64 {
    let tp = strategy.degrees.tp as f64;
    let between = if strategy.sequence_parallel { tp } else { 1.0 };
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

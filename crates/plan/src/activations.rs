//! What backward needs of forward, in bytes.
//!
//! Counted by the tensor. For a plain GPT block with dropout and written-down scores the sum is
//! `sbh (10 + 24/t + 5as/ht)`, as Korthikanti et al. have it; for a block with gated feed-forward, grouped
//! heads and flash attention it is `sb/t (8h + 4ad + 4gd + 6f)` and the softmax's sums.

use crate::{AttentionKernel, FeedForward, Recompute, Shape, Software, Strategy};

/// Bytes that one micro-batch leaves in one block, by who shares them.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct BlockActivations {
    /// What comes in, on this rank.
    pub input: f64,
    /// All but attention's scores.
    pub matrices: f64,
    /// Attention's scores, or the sums that stand for them.
    pub scores: f64,
    /// What is kept where every second product is computed again.
    pub products: f64,
}

impl BlockActivations {
    /// Of a block with or without experts.
    pub fn of(shape: &Shape, strategy: &Strategy, software: &Software, sparse: bool) -> Self {
        let tokens = tokens(strategy);
        let tp = strategy.degrees.tp as f64;
        let between = if strategy.sequence_parallel { tp } else { 1.0 };
        let bytes = strategy.precision.compute as f64;
        let hidden = shape.hidden_size as f64;
        let mask = if software.dropout { 1.0 } else { 0.0 };
        // Inputs of two norms, of attention and of the feed-forward part, and two masks.
        let whole = hidden * (4.0 * bytes + 2.0 * mask) / between;
        let inner = match sparse {
            true => expert_width(shape, bytes) / tp,
            false => feed_forward_width(shape, shape.intermediate_size) * bytes / tp,
        };
        let attention = attention_width(shape) * bytes / tp + latent_width(shape) * bytes / between;
        let scores = tokens * scores_width(shape, strategy, software) / tp;
        BlockActivations {
            input: tokens * hidden * bytes / between,
            matrices: tokens * (whole + attention + inner),
            scores,
            products: tokens * products_width(shape, strategy) * bytes + scores,
        }
    }

    /// What stays until backward.
    pub const fn kept(&self, recompute: Recompute) -> f64 {
        match recompute {
            Recompute::None => self.matrices + self.scores,
            Recompute::Selective => self.matrices,
            Recompute::Products => self.products,
            Recompute::Full => self.input,
        }
    }

    /// What is there beside that while one block goes backward.
    pub const fn computed_again(&self, recompute: Recompute) -> f64 {
        match recompute {
            Recompute::None => 0.0,
            Recompute::Selective => self.scores,
            // The last product is kept though backward does not need it.
            Recompute::Products => (self.matrices + self.scores - self.products).max(0.0),
            Recompute::Full => self.matrices + self.scores,
        }
    }
}

/// Tokens of a micro-batch on one rank.
pub(crate) fn tokens(strategy: &Strategy) -> f64 {
    (strategy.micro_batch * strategy.seq_len) as f64 / strategy.degrees.cp as f64
}

/// What a feed-forward part keeps between its matrices, per token and in elements.
fn feed_forward_width(shape: &Shape, width: usize) -> f64 {
    let kept = match shape.feed_forward {
        FeedForward::Gated => 3.0,
        FeedForward::Plain => 2.0,
    };
    kept * width as f64
}

/// What routed and shared experts keep per token, in bytes: a routed token is copied to its expert and
/// comes back to be weighed, and the router keeps a probability for every expert.
fn expert_width(shape: &Shape, bytes: f64) -> f64 {
    let Some(experts) = &shape.experts else {
        return feed_forward_width(shape, shape.intermediate_size) * bytes;
    };
    let routed = feed_forward_width(shape, experts.moe_intermediate_size);
    let copies = 2.0 * shape.hidden_size as f64;
    let shared = experts.num_shared_experts * experts.shared_intermediate_size;
    bytes * experts.num_experts_per_tok as f64 * (routed + copies)
        + bytes * feed_forward_width(shape, shared)
        + 4.0 * experts.num_experts as f64
}

/// Queries, keys, values and what goes into the last matrix, per token and in elements.
fn attention_width(shape: &Shape) -> f64 {
    let heads = shape.num_attention_heads as f64;
    if let Some(latent) = &shape.latent {
        let head = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) as f64;
        return heads * (2.0 * head + 2.0 * latent.v_head_dim as f64);
    }
    let (query, pair) = (
        heads * shape.head_dim as f64,
        2.0 * (shape.num_key_value_heads * shape.head_dim) as f64,
    );
    let normed = if shape.qk_norm {
        query + pair / 2.0
    } else {
        0.0
    };
    2.0 * query + pair + normed
}

/// What torchtitan's selective recomputation keeps of a dense block, per token and in elements: what comes in,
/// the first, third and every other product (queries, values, the gate, what leaves), what leaves attention,
/// and what ranks that share matrices have summed.
fn products_width(shape: &Shape, strategy: &Strategy) -> f64 {
    let tp = strategy.degrees.tp as f64;
    let between = if strategy.sequence_parallel { tp } else { 1.0 };
    let hidden = shape.hidden_size as f64;
    let query = (shape.num_attention_heads * shape.head_dim) as f64;
    let value = (shape.num_key_value_heads * shape.head_dim) as f64;
    let leaves = match shape.feed_forward {
        FeedForward::Gated => hidden,
        FeedForward::Plain => 0.0,
    };
    let summed = if tp > 1.0 {
        2.0 * hidden / between
    } else {
        0.0
    };
    let inside = 2.0 * query + value + shape.intermediate_size as f64;
    hidden / between + inside / tp + leaves + summed
}

/// Latents and what their norms keep.
fn latent_width(shape: &Shape) -> f64 {
    shape.latent.as_ref().map_or(0.0, |latent| {
        let query = latent.q_lora_rank.unwrap_or(0);
        (2 * query + 2 * latent.kv_lora_rank + latent.qk_rope_head_dim) as f64
    })
}

/// Per token of a query: the softmax, and with dropout its mask and what is left of it; or a 32-bit sum.
fn scores_width(shape: &Shape, strategy: &Strategy, software: &Software) -> f64 {
    let heads = shape.num_attention_heads as f64;
    let bytes = strategy.precision.compute as f64;
    match software.attention {
        AttentionKernel::Flash => 4.0 * heads,
        AttentionKernel::Materialised => {
            let dropped = if software.dropout { 1.0 + bytes } else { 0.0 };
            heads * strategy.seq_len as f64 * (bytes + dropped)
        }
    }
}

//! The operators of one block and their times.
//!
//! Matrix products are compute-bound and reach less of the peak the smaller they are. All other operators are bound
//! by memory bandwidth.

use crate::activations::tokens;
use crate::{Accelerator, AttentionKernel, Constants, Software, Strategy};
use trainyard_arch::{DecoderConfig, FeedForward, LatentAttention};

/// One operator of a block's forward pass, on one rank.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Operator {
    /// `copies` matrix products of `rows x depth` by `depth x columns`.
    Matmul {
        /// The operator's name.
        name: &'static str,
        /// Number of products of this size.
        copies: f64,
        /// Rows of the result: tokens.
        rows: f64,
        /// Columns of the result: the output dimension.
        columns: f64,
        /// The inner dimension.
        depth: f64,
    },
    /// Attention's two products and the softmax between them.
    Attention {
        /// FLOPs of both products, forward.
        flops: f64,
        /// Bytes of scores written to and read from memory, forward.
        bytes: f64,
        /// Slowdown factor for an unfavorable head dimension.
        slowdown: f64,
    },
    /// All element-wise operators together, bound by memory bandwidth.
    Stream {
        /// Bytes moved, forward.
        forward: f64,
        /// Bytes moved, backward.
        backward: f64,
    },
}

/// The time of an operator in seconds.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Seconds {
    /// Forward pass.
    pub forward: f64,
    /// Backward pass for the input gradient.
    pub backward_input: f64,
    /// Backward pass for the weight gradient.
    pub backward_weight: f64,
}

impl std::ops::AddAssign for Seconds {
    fn add_assign(&mut self, other: Seconds) {
        self.forward += other.forward;
        self.backward_input += other.backward_input;
        self.backward_weight += other.backward_weight;
    }
}

/// Estimates operator times from an accelerator's figures and the efficiency constants.
#[derive(Copy, Clone, Debug)]
pub struct ComputeModel<'a> {
    /// The accelerator.
    pub accelerator: &'a Accelerator,
    /// Its efficiency.
    pub constants: &'a Constants,
}

/// The peak for which `matmul_area` is stated: a faster accelerator needs proportionally larger products.
pub(crate) const REFERENCE_PEAK: f64 = 312e12;

impl ComputeModel<'_> {
    /// Seconds of `copies` matrix products of one size.
    pub fn matmul(&self, copies: f64, rows: f64, columns: f64, depth: f64) -> f64 {
        self.matmul_at(self.accelerator.peak.value, copies * rows * columns, depth)
    }

    /// Seconds of matrix products with `elements` elements of results in total, at another peak than that of 16-bit
    /// numbers.
    pub(crate) fn matmul_at(&self, peak: f64, elements: f64, depth: f64) -> f64 {
        let area = self.constants.matmul_area * peak / REFERENCE_PEAK;
        let idle = 1.0 + area / elements;
        let shallow = 1.0 + self.constants.matmul_depth / depth;
        let flops = 2.0 * elements * depth;
        flops / (peak * self.constants.matmul) * idle * shallow
    }

    /// Seconds to move bytes to or from device memory.
    pub fn stream(&self, bytes: f64) -> f64 {
        bytes / (self.accelerator.memory_bandwidth.value * self.constants.memory)
    }

    /// The time of an operator, forward and backward.
    pub fn estimate(&self, operator: &Operator, kernel: AttentionKernel) -> Seconds {
        match *operator {
            Operator::Matmul {
                copies,
                rows,
                columns,
                depth,
                ..
            } => Seconds {
                forward: self.matmul(copies, rows, columns, depth),
                backward_input: self.matmul(copies, rows, depth, columns),
                backward_weight: self.matmul(copies, depth, columns, rows),
            },
            Operator::Attention {
                flops,
                bytes,
                slowdown,
            } => {
                let (share, again) = match kernel {
                    AttentionKernel::Materialized => (self.constants.attention, 2.0),
                    // The backward pass recomputes the scores.
                    AttentionKernel::Flash => (self.constants.flash, 2.5),
                };
                let products = flops / (self.accelerator.peak.value * share) * slowdown;
                let passes = self.stream(bytes * self.constants.softmax);
                Seconds {
                    forward: products + passes,
                    backward_input: again * products + 5.0 / 3.0 * passes,
                    backward_weight: 0.0,
                }
            }
            Operator::Stream { forward, backward } => Seconds {
                forward: self.stream(forward),
                backward_input: self.stream(backward),
                backward_weight: 0.0,
            },
        }
    }
}

/// Bytes moved per score in the forward pass: two products, the softmax and dropout.
const SCORE_BYTES: f64 = 6.0;

/// The operators of a block's forward pass on one rank.
pub fn block_operators(
    shape: &DecoderConfig,
    strategy: &Strategy,
    software: &Software,
    sparse: bool,
) -> Vec<Operator> {
    let tokens = tokens(strategy);
    let tp = strategy.degrees.tp as f64;
    let mut operators = Vec::with_capacity(10);
    attention_matmuls(shape, tokens, tp, &mut operators);
    operators.push(attention(shape, strategy, software));
    match (&shape.moe, sparse) {
        (Some(_), true) => expert_matmuls(shape, strategy, &mut operators),
        _ => feed_forward(
            shape,
            "feed-forward",
            1.0,
            tokens,
            shape.intermediate_size as f64 / tp,
            &mut operators,
        ),
    }
    operators.push(streams(shape, strategy, software, sparse));
    operators
}

/// The fraction of each operator of a dense block that selective-op recomputation repeats: keys, the output
/// projection, one feed-forward product, and all element-wise operators.
pub(crate) fn recomputed_shares(shape: &DecoderConfig, operators: &[Operator]) -> Vec<f64> {
    let (query, key) = (shape.num_attention_heads, shape.num_key_value_heads);
    let keys = key as f64 / (query + 2 * key) as f64;
    // Gate and up projection are one operator here.
    let mut inner = match shape.feed_forward {
        FeedForward::Gated => [0.5, 0.0],
        FeedForward::Plain => [0.0, 1.0],
    }
    .into_iter();
    let share = |operator: &Operator| match operator {
        Operator::Attention { .. } => 0.0,
        Operator::Matmul { name, .. } if *name == "query, key, value" => keys,
        Operator::Matmul { name, .. } if *name == "feed-forward" => inner.next().unwrap_or(1.0),
        Operator::Matmul { .. } | Operator::Stream { .. } => 1.0,
    };
    operators.iter().map(share).collect()
}

fn attention_matmuls(shape: &DecoderConfig, tokens: f64, tp: f64, operators: &mut Vec<Operator>) {
    let hidden = shape.hidden_size as f64;
    let mut add = |name, columns: f64, depth: f64| {
        operators.push(Operator::Matmul {
            name,
            copies: 1.0,
            rows: tokens,
            columns,
            depth,
        });
    };
    let heads = shape.num_attention_heads as f64;
    match &shape.latent {
        Some(latent) => {
            let head = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) as f64;
            let kv_rank = latent.kv_lora_rank as f64;
            match latent.q_lora_rank {
                Some(rank) => {
                    add("query, down", rank as f64, hidden);
                    add("query, up", heads * head / tp, rank as f64);
                }
                None => add("query", heads * head / tp, hidden),
            }
            let inner = (latent.qk_nope_head_dim + latent.v_head_dim) as f64;
            add(
                "key and value, down",
                kv_rank + latent.qk_rope_head_dim as f64,
                hidden,
            );
            add("key and value, up", heads * inner / tp, kv_rank);
            add("output", hidden, heads * latent.v_head_dim as f64 / tp);
        }
        None => {
            let query = heads * shape.head_dim as f64;
            let key_value = 2.0 * (shape.num_key_value_heads * shape.head_dim) as f64;
            add("query, key, value", (query + key_value) / tp, hidden);
            add("output", hidden, query / tp);
        }
    }
}

fn attention(shape: &DecoderConfig, strategy: &Strategy, software: &Software) -> Operator {
    let tp = strategy.degrees.tp as f64;
    let (key, value) = match &shape.latent {
        Some(LatentAttention {
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            ..
        }) => (qk_nope_head_dim + qk_rope_head_dim, *v_head_dim),
        None => (shape.head_dim, shape.head_dim),
    };
    let heads = shape.num_attention_heads as f64 / tp;
    let scores = heads * tokens(strategy) * strategy.seq_len as f64;
    let flops = 2.0 * scores * (key + value) as f64;
    match software.attention {
        AttentionKernel::Materialized => Operator::Attention {
            flops,
            bytes: scores * SCORE_BYTES * strategy.precision.compute as f64,
            slowdown: alignment(key.max(value)),
        },
        // Half of the tiles are masked and skipped.
        AttentionKernel::Flash => Operator::Attention {
            flops: flops / 2.0,
            bytes: 0.0,
            slowdown: alignment(key.max(value)),
        },
    }
}

/// Tensor cores take eight 16-bit numbers at a time; other head dimensions need slower kernels. The factor is an
/// assumption.
const fn alignment(head_dim: usize) -> f64 {
    if head_dim.is_multiple_of(8) { 1.0 } else { 4.0 }
}

fn feed_forward(
    shape: &DecoderConfig,
    name: &'static str,
    copies: f64,
    rows: f64,
    width: f64,
    operators: &mut Vec<Operator>,
) {
    let hidden = shape.hidden_size as f64;
    let inner = match shape.feed_forward {
        FeedForward::Gated => 2.0 * width,
        FeedForward::Plain => width,
    };
    for (columns, depth) in [(inner, hidden), (hidden, width)] {
        operators.push(Operator::Matmul {
            name,
            copies,
            rows,
            columns,
            depth,
        });
    }
}

/// Expert products, with tokens spread evenly over experts. Tensor-parallel ranks shard the tokens, not the
/// experts.
fn expert_matmuls(shape: &DecoderConfig, strategy: &Strategy, operators: &mut Vec<Operator>) {
    let Some(experts) = &shape.moe else {
        return;
    };
    let tp = strategy.degrees.tp as f64;
    let local = (experts.num_experts as f64 / strategy.degrees.ep as f64).max(1.0);
    let routed = tokens(strategy) / tp * experts.num_experts_per_tok as f64;
    let width = experts.moe_intermediate_size as f64;
    feed_forward(shape, "experts", local, routed / local, width, operators);
    let shared = (experts.shared_width()) as f64;
    if shared > 0.0 {
        let rows = tokens(strategy);
        feed_forward(shape, "shared experts", 1.0, rows, shared / tp, operators);
    }
}

/// Norms, residuals and dropout work on the residual stream; activation functions, biases and rotary embeddings on
/// sharded tensors.
fn streams(
    shape: &DecoderConfig,
    strategy: &Strategy,
    software: &Software,
    sparse: bool,
) -> Operator {
    let tokens = tokens(strategy);
    let tp = strategy.degrees.tp as f64;
    let between = strategy.shards_between_products();
    let scale = strategy.precision.compute as f64 / 2.0;
    let hidden = shape.hidden_size as f64;
    let width = match (&shape.moe, sparse) {
        (Some(experts), true) => {
            let routed = experts.num_experts_per_tok * experts.moe_intermediate_size;
            let shared = experts.shared_width();
            // Routed tokens are permuted before and after the experts.
            (routed + shared + 4 * experts.num_experts_per_tok * shape.hidden_size) as f64
        }
        _ => shape.intermediate_size as f64,
    };
    let gates = match shape.feed_forward {
        FeedForward::Gated => 1.5,
        FeedForward::Plain => 1.0,
    };
    let query = (shape.num_attention_heads * shape.head_dim) as f64;
    let (stream, again) = if software.dropout {
        (22.0, 30.0)
    } else {
        (16.0, 24.0)
    };
    let inside = 4.0 * gates * width + 6.0 * query;
    Operator::Stream {
        forward: scale * tokens * (stream * hidden / between + inside / tp),
        backward: scale * tokens * (again * hidden / between + 1.6 * inside / tp),
    }
}

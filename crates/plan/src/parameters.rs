//! Exact parameter counts of a model and how they are sharded.
//!
//! Counted matrix by matrix, because each kind is sharded differently: tensor parallelism shards matrices but not
//! norms, expert parallelism shards experts only, and the first and last pipeline stages hold the embedding and the
//! head.

use crate::{FeedForward, Norm, Positions, Shape};

/// The parameters of a block, by how they are sharded.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct BlockParameters {
    /// Matrices (and their biases) that tensor parallelism shards.
    pub sharded: u64,
    /// Parameters replicated on every tensor-parallel rank: norms, the router, latent projections.
    pub replicated: u64,
    /// All routed experts of the block.
    pub experts: u64,
}

impl BlockParameters {
    /// The sum of all kinds.
    pub const fn total(&self) -> u64 {
        self.sharded + self.replicated + self.experts
    }
}

impl Shape {
    /// The total number of parameters.
    pub fn num_parameters(&self) -> u64 {
        let (dense, sparse) = (self.dense_block(), self.expert_block());
        let num_sparse = self.num_expert_layers() as u64;
        let num_dense = self.num_hidden_layers as u64 - num_sparse;
        num_dense * dense.total() + num_sparse * sparse.total() + self.outside_blocks()
    }

    /// The number of parameters that are active per token.
    pub fn num_active_parameters(&self) -> u64 {
        let Some(experts) = &self.experts else {
            return self.num_parameters();
        };
        let idle = (experts.num_experts - experts.num_experts_per_tok) as u64;
        let each = self.feed_forward_weights(experts.moe_intermediate_size);
        self.num_parameters() - self.num_expert_layers() as u64 * idle * each
    }

    /// Parameters outside of blocks: embedding, positions, final norm and output head.
    pub fn outside_blocks(&self) -> u64 {
        let head = if self.tie_word_embeddings {
            0
        } else {
            self.embedding()
        };
        self.embedding() + self.position_table() + self.norm() + head
    }

    /// Parameters of the token embedding; the output head has as many.
    pub fn embedding(&self) -> u64 {
        (self.vocab_size * self.hidden_size) as u64
    }

    /// Parameters of the learned position table, if there is one.
    pub fn position_table(&self) -> u64 {
        match self.positions {
            Positions::Learned => (self.max_position_embeddings * self.hidden_size) as u64,
            Positions::Rotary => 0,
        }
    }

    /// Parameters of one norm of the residual stream.
    pub fn norm(&self) -> u64 {
        match self.norm {
            Norm::RootMeanSquare => self.hidden_size as u64,
            Norm::Layer => 2 * self.hidden_size as u64,
        }
    }

    /// The parameters of a dense block.
    pub fn dense_block(&self) -> BlockParameters {
        let mut block = self.attention();
        let width = self.intermediate_size as u64;
        block.sharded += self.feed_forward_weights(self.intermediate_size);
        if self.has_biases {
            let inner = self.num_inner_matrices() * width;
            block.sharded += inner;
            block.replicated += self.hidden_size as u64;
        }
        block.replicated += 2 * self.norm();
        block
    }

    /// The parameters of a block with experts; of a dense block if the model has none.
    pub fn expert_block(&self) -> BlockParameters {
        let Some(experts) = &self.experts else {
            return self.dense_block();
        };
        let hidden = self.hidden_size as u64;
        let num_experts = experts.num_experts as u64;
        let mut block = self.attention();
        block.experts = num_experts * self.feed_forward_weights(experts.moe_intermediate_size);
        let shared_width = experts.num_shared_experts * experts.shared_intermediate_size;
        block.sharded += self.feed_forward_weights(shared_width);
        block.replicated += 2 * self.norm() + num_experts * hidden;
        block.replicated += if experts.has_shared_gate { hidden } else { 0 };
        block.replicated += if experts.has_router_bias {
            num_experts
        } else {
            0
        };
        block
    }

    /// The parameters of attention with its biases and per-head norms.
    fn attention(&self) -> BlockParameters {
        let hidden = self.hidden_size as u64;
        let heads = self.num_attention_heads as u64;
        if let Some(latent) = &self.latent {
            let head = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) as u64;
            let (kv_rank, rope) = (latent.kv_lora_rank as u64, latent.qk_rope_head_dim as u64);
            let inner = (latent.qk_nope_head_dim + latent.v_head_dim) as u64;
            let output = heads * latent.v_head_dim as u64 * hidden;
            let (narrow, query) = match latent.q_lora_rank {
                Some(rank) => (
                    hidden * rank as u64 + rank as u64,
                    rank as u64 * heads * head,
                ),
                None => (0, hidden * heads * head),
            };
            return BlockParameters {
                sharded: query + kv_rank * heads * inner + output,
                replicated: narrow + hidden * (kv_rank + rope) + kv_rank,
                experts: 0,
            };
        }
        let query = heads * self.head_dim as u64;
        let key_value = (self.num_key_value_heads * self.head_dim) as u64;
        let has_bias = self.has_biases || self.attention_bias;
        let input_bias = if has_bias { query + 2 * key_value } else { 0 };
        let head_norms = if self.qk_norm {
            2 * self.head_dim as u64
        } else {
            0
        };
        BlockParameters {
            sharded: hidden * (2 * query + 2 * key_value) + input_bias,
            replicated: head_norms + if self.has_biases { hidden } else { 0 },
            experts: 0,
        }
    }

    /// Weights of a feed-forward layer of the given intermediate size.
    pub fn feed_forward_weights(&self, width: usize) -> u64 {
        (self.num_inner_matrices() + 1) * (self.hidden_size * width) as u64
    }

    /// Number of input matrices of a feed-forward layer.
    const fn num_inner_matrices(&self) -> u64 {
        match self.feed_forward {
            FeedForward::Gated => 2,
            FeedForward::Plain => 1,
        }
    }
}

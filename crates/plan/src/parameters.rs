//! How many parameters a shape has, exactly, and where they lie.
//!
//! Counted by the matrix, because each part is shared by other ranks: tensor-parallel ranks share
//! matrices but not norms, expert-parallel ranks share experts only, and the first and the last stage
//! of a pipeline hold what no other stage has.

use crate::{FeedForward, Norm, Positions, Shape};

/// The parameters of a block, by who shares them.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct BlockParameters {
    /// Matrices (and their biases) that tensor-parallel ranks share.
    pub shared: u64,
    /// What every tensor-parallel rank holds whole: norms, the router, narrow latents.
    pub whole: u64,
    /// All experts of the block.
    pub experts: u64,
}

impl BlockParameters {
    /// All of them.
    pub const fn total(&self) -> u64 {
        self.shared + self.whole + self.experts
    }
}

impl Shape {
    /// Every parameter of the model.
    pub fn num_parameters(&self) -> u64 {
        let (dense, sparse) = (self.dense_block(), self.expert_block());
        let num_sparse = self.num_expert_layers() as u64;
        let num_dense = self.num_hidden_layers as u64 - num_sparse;
        num_dense * dense.total() + num_sparse * sparse.total() + self.outside_blocks()
    }

    /// The parameters that one token is computed with.
    pub fn num_active_parameters(&self) -> u64 {
        let Some(experts) = &self.experts else {
            return self.num_parameters();
        };
        let idle = (experts.num_experts - experts.num_experts_per_tok) as u64;
        let each = self.feed_forward_weights(experts.moe_intermediate_size);
        self.num_parameters() - self.num_expert_layers() as u64 * idle * each
    }

    /// Embedding, positions, last norm and head.
    pub fn outside_blocks(&self) -> u64 {
        let head = match self.tie_word_embeddings {
            true => 0,
            false => self.embedding(),
        };
        self.embedding() + self.position_table() + self.norm() + head
    }

    /// The embedding's table; the head's is as large.
    pub fn embedding(&self) -> u64 {
        (self.vocab_size * self.hidden_size) as u64
    }

    /// The learnt table of positions, if there is one.
    pub fn position_table(&self) -> u64 {
        match self.positions {
            Positions::Learnt => (self.max_position_embeddings * self.hidden_size) as u64,
            Positions::Rotary => 0,
        }
    }

    /// One norm of the residual stream.
    pub fn norm(&self) -> u64 {
        match self.norm {
            Norm::RootMeanSquare => self.hidden_size as u64,
            Norm::Layer => 2 * self.hidden_size as u64,
        }
    }

    /// A block without experts.
    pub fn dense_block(&self) -> BlockParameters {
        let mut block = self.attention();
        let width = self.intermediate_size as u64;
        block.shared += self.feed_forward_weights(self.intermediate_size);
        if self.has_biases {
            let inner = self.num_inner_matrices() * width;
            block.shared += inner;
            block.whole += self.hidden_size as u64;
        }
        block.whole += 2 * self.norm();
        block
    }

    /// A block with experts; without a mixture the same as a dense one.
    pub fn expert_block(&self) -> BlockParameters {
        let Some(experts) = &self.experts else {
            return self.dense_block();
        };
        let hidden = self.hidden_size as u64;
        let num_experts = experts.num_experts as u64;
        let mut block = self.attention();
        block.experts = num_experts * self.feed_forward_weights(experts.moe_intermediate_size);
        let shared_width = experts.num_shared_experts * experts.shared_intermediate_size;
        block.shared += self.feed_forward_weights(shared_width);
        block.whole += 2 * self.norm() + num_experts * hidden;
        block.whole += if experts.has_shared_gate { hidden } else { 0 };
        block.whole += if experts.has_router_bias {
            num_experts
        } else {
            0
        };
        block
    }

    /// Attention with its biases and head norms.
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
                shared: query + kv_rank * heads * inner + output,
                whole: narrow + hidden * (kv_rank + rope) + kv_rank,
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
            shared: hidden * (2 * query + 2 * key_value) + input_bias,
            whole: head_norms + if self.has_biases { hidden } else { 0 },
            experts: 0,
        }
    }

    /// The matrices of a feed-forward part of the given width.
    pub fn feed_forward_weights(&self, width: usize) -> u64 {
        (self.num_inner_matrices() + 1) * (self.hidden_size * width) as u64
    }

    /// Matrices that go from the stream into a feed-forward part.
    const fn num_inner_matrices(&self) -> u64 {
        match self.feed_forward {
            FeedForward::Gated => 2,
            FeedForward::Plain => 1,
        }
    }
}

//! Floating-point operations of a decoder, counted as publications do.

use crate::{BlockKind, DecoderConfig, MoeConfig};

impl DecoderConfig {
    /// FLOPs of a token in a sequence of `seq_len`: the forward pass, and twice that for the backward pass. Attention
    /// counts in full although half of it is masked.
    pub fn flops_per_token(&self, seq_len: usize) -> f64 {
        6.0 * (self.matrix_weights() as f64 + self.attention_weights(seq_len))
    }

    /// Weights that a token is multiplied with, including the output head.
    pub fn matrix_weights(&self) -> u64 {
        let attention = self.attention_matrices();
        let dense = attention + self.feed_forward_weights(self.intermediate_size);
        let of_experts = |moe: &MoeConfig| {
            moe.num_experts_per_tok as u64 * self.feed_forward_weights(moe.moe_intermediate_size)
                + self.feed_forward_weights(moe.shared_width())
                + (moe.num_experts * self.hidden_size) as u64
        };
        let sparse = attention + self.moe.as_ref().map_or(0, of_experts);
        self.num_dense_layers() as u64 * dense
            + self.num_expert_layers() as u64 * sparse
            + self.embedding()
    }

    /// The approximate cost of every unit that a pipeline places, embedding and head included, in multiplications per
    /// token: it decides which stage holds which block.
    pub fn unit_costs(&self, seq_len: usize) -> Vec<f64> {
        let attention = (self.query_width() * seq_len) as f64;
        let share = self.moe.as_ref().map_or(0.0, MoeConfig::active_fraction);
        let block = |kind| {
            let parameters = self.block(kind);
            let always = parameters.sharded + parameters.replicated;
            always as f64 + share * parameters.experts as f64 + attention
        };
        let (dense, sparse) = (block(BlockKind::Dense), block(BlockKind::Experts));
        let blocks = (0..self.num_hidden_layers).map(|layer| {
            if layer < self.num_dense_layers() {
                dense
            } else {
                sparse
            }
        });
        let head = (self.embedding() + self.norm_parameters()) as f64;
        // An embedding lookup has no multiplications.
        std::iter::once(0.0).chain(blocks).chain([head]).collect()
    }

    /// The weights of the projections of attention in a block.
    pub fn attention_matrices(&self) -> u64 {
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        let weights = match &self.latent {
            None => 2 * hidden * (self.query_width() + self.key_value_width()),
            Some(latent) => {
                let query = heads * latent.qk_head_dim();
                let query = match latent.q_lora_rank {
                    Some(rank) => rank * (hidden + query),
                    None => hidden * query,
                };
                let (rank, values) = (latent.kv_lora_rank, heads * latent.v_head_dim);
                let expanded = heads * latent.qk_nope_head_dim + values;
                let narrow = hidden * (rank + latent.qk_rope_head_dim);
                query + narrow + rank * expanded + values * hidden
            }
        };
        weights as u64
    }

    /// The equivalent number of weights of attention's two products: `seq_len` keys per query, masked ones included.
    pub fn attention_weights(&self, seq_len: usize) -> f64 {
        let of_head = match &self.latent {
            Some(latent) => latent.qk_head_dim() + latent.v_head_dim,
            None => 2 * self.head_dim,
        };
        let width = (self.num_attention_heads * of_head) as f64;
        self.num_hidden_layers as f64 * width * seq_len as f64
    }
}

//! Multi-head latent attention.

use serde::{Deserialize, Serialize};

/// Multi-head latent attention (MLA): queries, keys and values are projected through low-rank latents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatentAttention {
    /// Rank of the query latent; `None` if queries are projected directly.
    pub q_lora_rank: Option<usize>,
    /// Rank of the key/value latent.
    pub kv_lora_rank: usize,
    /// Width of the part of a query or key head without rotary embedding.
    pub qk_nope_head_dim: usize,
    /// Width of the part with rotary embedding; all heads share it in keys.
    pub qk_rope_head_dim: usize,
    /// Width of a value head.
    pub v_head_dim: usize,
}

impl LatentAttention {
    /// Width of a query or key head.
    pub const fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim.saturating_add(self.qk_rope_head_dim)
    }
}

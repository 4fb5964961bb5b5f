//! Matrices that files of some families have as one.

use crate::DecoderConfig;

/// A matrix of a block in a file: several matrices of the model, one below the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FusedProjection {
    /// Its name in files, below that of the block.
    pub name: &'static str,
    /// The name and the number of rows of each matrix of the model.
    pub parts: Vec<(&'static str, usize)>,
}

impl DecoderConfig {
    /// The fused matrices of files.
    pub fn fused_projections(&self) -> Vec<FusedProjection> {
        if !self.has_fused_projections {
            return Vec::new();
        }
        let (key_value, inner) = (self.key_value_width(), self.intermediate_size);
        vec![
            FusedProjection {
                name: "self_attn.qkv_proj.weight",
                parts: vec![
                    ("self_attn.q_proj.weight", self.query_width()),
                    ("self_attn.k_proj.weight", key_value),
                    ("self_attn.v_proj.weight", key_value),
                ],
            },
            FusedProjection {
                name: "mlp.gate_up_proj.weight",
                parts: vec![
                    ("mlp.gate_proj.weight", inner),
                    ("mlp.up_proj.weight", inner),
                ],
            },
        ]
    }
}

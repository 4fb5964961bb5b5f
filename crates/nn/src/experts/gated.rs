//! Experts that are gated MLPs, as in Mixtral, Qwen and DeepSeek.

use tch::Tensor;
use trainyard_arch::MoeConfig;

use super::expert_layer::Experts;
use super::grouped;
use crate::{Builder, Init, Module, Parameter, Result};

/// The weights of this rank's experts.
#[derive(Module, Debug)]
pub(super) struct GatedExperts {
    /// [experts, 2 · intermediate, width]: the gate projection, then the up projection.
    gate_up_proj: Parameter,
    /// [experts, width, intermediate].
    down_proj: Parameter,
}

impl GatedExperts {
    pub(super) fn build(
        builder: &Builder,
        width: usize,
        config: &MoeConfig,
        init: Init,
    ) -> Result<GatedExperts> {
        let (number, inner) = (config.num_experts, config.moe_intermediate_size);
        Ok(GatedExperts {
            gate_up_proj: builder.experts("gate_up_proj", &[number, 2 * inner, width], init)?,
            down_proj: builder.experts("down_proj", &[number, width, inner], init)?,
        })
    }
}

impl Experts for GatedExperts {
    /// `down(silu(gate(x)) · up(x))` of every expert for its rows, which are sorted by expert.
    fn forward(&self, x: &Tensor, num_rows: &[i64]) -> Result<Tensor> {
        let both = grouped::products(x, &self.gate_up_proj.value()?, num_rows)?;
        let halves = both.f_chunk(2, 1)?;
        let inner = halves[0].f_silu()?.f_mul(&halves[1])?;
        grouped::products(&inner, &self.down_proj.value()?, num_rows)
    }
}

//! `[model.moe]`: mixture of experts, with Hugging Face's names where they exist.

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};
use trainyard_arch::ScoringFunc;

/// `[model.moe]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct MoeSection {
    /// Experts per layer. (Mixtral calls it `num_local_experts`, DeepSeek `n_routed_experts`.)
    pub num_experts: Option<usize>,
    /// Experts per token; 2 if absent.
    pub num_experts_per_tok: Option<usize>,
    /// Width of an expert; `model.intermediate_size` if absent.
    pub moe_intermediate_size: Option<usize>,
    /// Shared experts, which process every token.
    pub n_shared_experts: Option<usize>,
    /// Number of dense blocks at the beginning.
    pub first_k_dense_replace: Option<usize>,
    /// The router's scoring function: `softmax` or `sigmoid`.
    pub scoring_func: Option<ScoringFunc>,
    /// Whether the weights of a token are normalized to sum to 1; true if absent.
    pub norm_topk_prob: Option<bool>,
    /// Factor on the weights.
    pub routed_scaling_factor: Option<f64>,
    /// Coefficient of the load-balancing loss, computed per sequence.
    pub router_aux_loss_coef: Option<f64>,
    /// Coefficient of the router z-loss.
    pub router_z_loss_coef: Option<f64>,
    /// Update rate of the expert bias of auxiliary-loss-free balancing; no bias if absent.
    pub bias_update_rate: Option<f64>,
    /// Capacity of an expert per sequence, relative to an equal load; unlimited if absent.
    pub capacity_factor: Option<f64>,
}

//! `[model.moe]`: the experts of a mixture, under Hugging Face's names where it has them.

use serde::{Deserialize, Serialize};

/// How the scores of experts are made from logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScoringFunc {
    /// They add up to one.
    #[default]
    #[serde(rename = "softmax")]
    Softmax,
    /// Each for itself, as DeepSeek-V3 has it.
    #[serde(rename = "sigmoid")]
    Sigmoid,
}

/// `[model.moe]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MoeSection {
    /// Experts of a layer. (Mixtral calls it `num_local_experts`, DeepSeek `n_routed_experts`.)
    pub num_experts: Option<usize>,
    /// Experts each token goes to; 2 if absent.
    pub num_experts_per_tok: Option<usize>,
    /// Width inside an expert; `model.intermediate_size` if absent.
    pub moe_intermediate_size: Option<usize>,
    /// Experts that every token goes through.
    pub n_shared_experts: Option<usize>,
    /// Blocks at the beginning that have a dense feed-forward part.
    pub first_k_dense_replace: Option<usize>,
    /// How scores are made: `softmax` or `sigmoid`.
    pub scoring_func: Option<ScoringFunc>,
    /// Whether a token's weights are divided by their sum; true if absent.
    pub norm_topk_prob: Option<bool>,
    /// What weights are multiplied by.
    pub routed_scaling_factor: Option<f64>,
    /// The weight of the loss that punishes unequal loads, of each sequence for itself.
    pub router_aux_loss_coef: Option<f64>,
    /// The weight of the loss that keeps the router's logits small.
    pub router_z_loss_coef: Option<f64>,
    /// How far a step moves the bias that balances without a loss; no bias if absent.
    pub bias_update_rate: Option<f64>,
    /// Rows an expert takes of a sequence, in shares of an equal load; all that come if absent.
    pub capacity_factor: Option<f64>,
}

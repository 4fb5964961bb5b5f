//! The experts of a mixture of experts.

use serde::{Deserialize, Serialize};

/// The update rate of the router's bias in the training of DeepSeek-V3. No `config.json` has it, nor do other frameworks.
pub const BIAS_UPDATE_RATE: f64 = 0.001;

/// How a router turns logits into scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScoringFunc {
    /// A softmax over all experts.
    #[default]
    Softmax,
    /// A sigmoid per expert.
    Sigmoid,
}

/// How a group of experts is scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// By its best expert, as in DeepSeek-V2.
    Best,
    /// By the sum of its two best experts, as in DeepSeek-V3.
    BestTwo,
}

/// Groups of experts: a token uses experts of the best groups only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutingGroups {
    /// The number of groups, of equal size.
    pub n_group: usize,
    /// The number of groups that a token may use.
    pub topk_group: usize,
    /// How groups are scored.
    pub score: GroupScore,
}

/// The experts of the blocks that have them. Fields have the names of Hugging Face's `config.json` where it has them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeConfig {
    /// Routed experts per block.
    pub num_experts: usize,
    /// Routed experts per token (top-k).
    pub num_experts_per_tok: usize,
    /// Width of a routed expert.
    pub moe_intermediate_size: usize,
    /// Shared experts, which process every token.
    pub n_shared_experts: usize,
    /// Width of a shared expert; that of a routed one if absent.
    pub shared_expert_intermediate_size: Option<usize>,
    /// Whether a learned gate scales the output of the shared experts.
    pub has_shared_gate: bool,
    /// Number of leading blocks without experts.
    pub first_k_dense_replace: usize,
    /// The router's scoring function.
    pub scoring_func: ScoringFunc,
    /// Groups that limit the choice of a token, if there are some.
    pub groups: Option<RoutingGroups>,
    /// Whether the weights of a token are normalized to sum to 1.
    pub norm_topk_prob: bool,
    /// Factor on the weights.
    pub routed_scaling_factor: f64,
    /// Coefficient of the load-balancing loss.
    pub router_aux_loss_coef: f64,
    /// Coefficient of the router z-loss.
    pub router_z_loss_coef: f64,
    /// Update rate of the router's bias per expert, which balances the load; no such bias if absent.
    pub bias_update_rate: Option<f64>,
    /// Capacity of an expert per sequence, relative to an equal load.
    pub capacity_factor: Option<f64>,
}

impl MoeConfig {
    /// Experts in every block, without shared ones, with default settings.
    pub fn plain(num_experts: usize, num_experts_per_tok: usize, width: usize) -> MoeConfig {
        MoeConfig {
            num_experts,
            num_experts_per_tok,
            moe_intermediate_size: width,
            n_shared_experts: 0,
            shared_expert_intermediate_size: None,
            has_shared_gate: false,
            first_k_dense_replace: 0,
            scoring_func: ScoringFunc::Softmax,
            groups: None,
            norm_topk_prob: true,
            routed_scaling_factor: 1.0,
            router_aux_loss_coef: 0.0,
            router_z_loss_coef: 0.0,
            bias_update_rate: None,
            capacity_factor: None,
        }
    }

    /// The share of the routed experts that compute a token.
    pub fn active_fraction(&self) -> f64 {
        self.num_experts_per_tok as f64 / self.num_experts.max(1) as f64
    }

    /// Total width of all shared experts.
    pub fn shared_width(&self) -> usize {
        let each = self.shared_expert_intermediate_size;
        self.n_shared_experts * each.unwrap_or(self.moe_intermediate_size)
    }
}

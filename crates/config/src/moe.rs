//! The resolved mixture-of-experts settings: their validation and their size.

use crate::llama::{check_positive, check_sizes};
use crate::section::within;
use crate::{ConfigError, MoeSection, ScoringFunc};

/// A mixture of experts with all defaults resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Experts per layer.
    pub num_experts: usize,
    /// Experts per token.
    pub num_experts_per_tok: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Shared experts, which process every token.
    pub n_shared_experts: usize,
    /// Number of dense blocks at the beginning.
    pub first_k_dense_replace: usize,
    /// The router's scoring function.
    pub scoring_func: ScoringFunc,
    /// Whether the weights of a token are normalized to sum to 1.
    pub norm_topk_prob: bool,
    /// Factor on the weights.
    pub routed_scaling_factor: f64,
    /// Coefficient of the load-balancing loss.
    pub router_aux_loss_coef: f64,
    /// Coefficient of the router z-loss.
    pub router_z_loss_coef: f64,
    /// Update rate of the expert bias of auxiliary-loss-free balancing.
    pub bias_update_rate: Option<f64>,
    /// Capacity of an expert per sequence, relative to an equal load.
    pub capacity_factor: Option<f64>,
}

impl MoeConfig {
    /// `num_experts` experts, of which each token uses some, with default settings.
    pub fn plain(num_experts: usize, num_experts_per_tok: usize, width: usize) -> MoeConfig {
        MoeConfig {
            num_experts,
            num_experts_per_tok,
            moe_intermediate_size: width,
            n_shared_experts: 0,
            first_k_dense_replace: 0,
            scoring_func: ScoringFunc::Softmax,
            norm_topk_prob: true,
            routed_scaling_factor: 1.0,
            router_aux_loss_coef: 0.0,
            router_z_loss_coef: 0.0,
            bias_update_rate: None,
            capacity_factor: None,
        }
    }

    /// Total width of all shared experts.
    pub fn shared_width(&self) -> usize {
        self.n_shared_experts * self.moe_intermediate_size
    }

    /// Trainable parameters of a layer's feed-forward part, counting `num_experts` experts.
    pub(crate) fn num_parameters(&self, hidden_size: usize, num_experts: usize) -> u64 {
        let hidden = hidden_size as u64;
        let experts = 3 * hidden * (num_experts * self.moe_intermediate_size) as u64;
        let shared = 3 * hidden * self.shared_width() as u64;
        experts + shared + hidden * self.num_experts as u64
    }

    /// Rejects invalid settings.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        check_sizes(&[
            ("moe.num_experts", self.num_experts),
            ("moe.num_experts_per_tok", self.num_experts_per_tok),
            ("moe.moe_intermediate_size", self.moe_intermediate_size),
            (
                "moe.num_experts x moe_intermediate_size",
                self.num_experts.saturating_mul(self.moe_intermediate_size),
            ),
            (
                "moe.n_shared_experts x moe_intermediate_size",
                self.n_shared_experts
                    .saturating_mul(self.moe_intermediate_size)
                    .max(1),
            ),
        ])?;
        let (all, chosen) = (self.num_experts, self.num_experts_per_tok);
        if chosen > all {
            return Err(ConfigError::contradiction(
                format!("model.moe.num_experts_per_tok = {chosen}, but num_experts = {all}"),
                format!("the nearest valid choice is model.moe.num_experts_per_tok = {all}"),
            ));
        }
        check_positive(
            "model.moe.routed_scaling_factor",
            self.routed_scaling_factor,
        )?;
        for (key, value) in [
            ("model.moe.router_aux_loss_coef", self.router_aux_loss_coef),
            ("model.moe.router_z_loss_coef", self.router_z_loss_coef),
            (
                "model.moe.bias_update_rate",
                self.bias_update_rate.unwrap_or(0.0),
            ),
        ] {
            within(key, value, 0.0, 1e6)?;
        }
        match self.capacity_factor {
            Some(factor) => check_positive("model.moe.capacity_factor", factor),
            None => Ok(()),
        }
    }
}

impl MoeSection {
    /// Resolves these keys, which override those of `base` if it is given; `width` is the width of a dense MLP.
    pub(crate) fn resolve(
        &self,
        base: Option<MoeConfig>,
        width: usize,
    ) -> Result<MoeConfig, ConfigError> {
        let number = self.num_experts.or(base.as_ref().map(|b| b.num_experts));
        let Some(num_experts) = number else {
            return Err(ConfigError::contradiction(
                "[model.moe] does not set the number of experts",
                "set model.moe.num_experts",
            ));
        };
        let base = base.unwrap_or_else(|| MoeConfig::plain(num_experts, 2.min(num_experts), width));
        let or = |given: Option<usize>, base| given.unwrap_or(base);
        let mixture = MoeConfig {
            num_experts,
            num_experts_per_tok: or(self.num_experts_per_tok, base.num_experts_per_tok),
            moe_intermediate_size: or(self.moe_intermediate_size, base.moe_intermediate_size),
            n_shared_experts: or(self.n_shared_experts, base.n_shared_experts),
            first_k_dense_replace: or(self.first_k_dense_replace, base.first_k_dense_replace),
            scoring_func: self.scoring_func.unwrap_or(base.scoring_func),
            norm_topk_prob: self.norm_topk_prob.unwrap_or(base.norm_topk_prob),
            routed_scaling_factor: self
                .routed_scaling_factor
                .unwrap_or(base.routed_scaling_factor),
            router_aux_loss_coef: self
                .router_aux_loss_coef
                .unwrap_or(base.router_aux_loss_coef),
            router_z_loss_coef: self.router_z_loss_coef.unwrap_or(base.router_z_loss_coef),
            bias_update_rate: self.bias_update_rate.or(base.bias_update_rate),
            capacity_factor: self.capacity_factor.or(base.capacity_factor),
        };
        mixture.check()?;
        Ok(mixture)
    }
}

impl From<&MoeConfig> for MoeSection {
    fn from(mixture: &MoeConfig) -> MoeSection {
        MoeSection {
            num_experts: Some(mixture.num_experts),
            num_experts_per_tok: Some(mixture.num_experts_per_tok),
            moe_intermediate_size: Some(mixture.moe_intermediate_size),
            n_shared_experts: Some(mixture.n_shared_experts),
            first_k_dense_replace: Some(mixture.first_k_dense_replace),
            scoring_func: Some(mixture.scoring_func),
            norm_topk_prob: Some(mixture.norm_topk_prob),
            routed_scaling_factor: Some(mixture.routed_scaling_factor),
            router_aux_loss_coef: Some(mixture.router_aux_loss_coef),
            router_z_loss_coef: Some(mixture.router_z_loss_coef),
            bias_update_rate: mixture.bias_update_rate,
            capacity_factor: mixture.capacity_factor,
        }
    }
}

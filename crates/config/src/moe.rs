//! The experts of a mixture: what they must satisfy, and their size.

use crate::llama::{check_positive, check_sizes};
use crate::section::within;
use crate::{ConfigError, MoeSection, ScoringFunc};

/// A mixture with nothing left open.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts each token goes to.
    pub num_experts_per_tok: usize,
    /// Width inside an expert.
    pub moe_intermediate_size: usize,
    /// Experts that every token goes through.
    pub n_shared_experts: usize,
    /// Blocks at the beginning that have a dense feed-forward part.
    pub first_k_dense_replace: usize,
    /// How scores are made.
    pub scoring_func: ScoringFunc,
    /// Whether a token's weights are divided by their sum.
    pub norm_topk_prob: bool,
    /// What weights are multiplied by.
    pub routed_scaling_factor: f64,
    /// The weight of the loss that punishes unequal loads.
    pub router_aux_loss_coef: f64,
    /// The weight of the loss that keeps logits small.
    pub router_z_loss_coef: f64,
    /// How far a step moves the bias that balances without a loss.
    pub bias_update_rate: Option<f64>,
    /// Rows an expert takes of a sequence, in shares of an equal load.
    pub capacity_factor: Option<f64>,
}

impl MoeConfig {
    /// So many experts, of which each token goes to some, and nothing special.
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

    /// Width of all shared experts together.
    pub fn shared_width(&self) -> usize {
        self.n_shared_experts * self.moe_intermediate_size
    }

    /// Trained parameters of a layer's feed-forward part, of which `num_experts` are counted.
    pub(crate) fn num_parameters(&self, hidden_size: usize, num_experts: usize) -> u64 {
        let hidden = hidden_size as u64;
        let experts = 3 * hidden * (num_experts * self.moe_intermediate_size) as u64;
        let shared = 3 * hidden * self.shared_width() as u64;
        experts + shared + hidden * self.num_experts as u64
    }

    /// Refuses what no mixture can have.
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
    /// The mixture these keys describe, changing `base` where there is one; `width` is that of a dense
    /// feed-forward part.
    pub(crate) fn resolve(
        &self,
        base: Option<MoeConfig>,
        width: usize,
    ) -> Result<MoeConfig, ConfigError> {
        let number = self.num_experts.or(base.as_ref().map(|b| b.num_experts));
        let Some(num_experts) = number else {
            return Err(ConfigError::contradiction(
                "[model.moe] does not say how many experts there are",
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

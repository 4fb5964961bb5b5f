//! Rejects dimensions that no model can have.

use crate::{
    Activation, ArchError, DecoderConfig, FeedForward, GroupScore, LatentAttention, MoeConfig,
    Norm, Positions, RopeScaling, RoutingGroups,
};

/// Within these limits no size computed from a decoder overflows; values beyond them are mistakes.
const WIDTH: usize = 1 << 24;
const LAYERS: usize = 1 << 12;
const POSITIONS: usize = 1 << 32;
const EXPERTS: usize = 1 << 16;

type Checked = Result<(), ArchError>;

impl DecoderConfig {
    /// Rejects invalid dimensions.
    pub fn check(&self) -> Checked {
        self.check_sizes()?;
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            let nearest = nearest_divisor(heads, kv_heads);
            return Err(ArchError::contradiction(
                format!(
                    "num_attention_heads = {heads} is not divisible by num_key_value_heads = {kv_heads}"
                ),
                format!("the nearest valid choice is num_key_value_heads = {nearest}"),
            ));
        }
        let is_rotary = self.positions == Positions::Rotary;
        if is_rotary && !self.head_dim.is_multiple_of(2) {
            let (odd, even) = (self.head_dim, self.head_dim + 1);
            return Err(ArchError::contradiction(
                format!("head_dim = {odd} is odd, but rotary embedding rotates pairs"),
                format!("the nearest valid choice is head_dim = {even}"),
            ));
        }
        if !(0.0..=0.99).contains(&self.resid_pdrop) {
            return Err(ArchError::contradiction(
                format!("resid_pdrop = {}", self.resid_pdrop),
                "use 0 to 0.99",
            ));
        }
        positive("rope_theta", self.rope_theta)?;
        positive("norm_eps", self.norm_eps)?;
        if let Some(scalar) = self.query_pre_attn_scalar {
            positive("query_pre_attn_scalar", scalar)?;
        }
        if self.latent.is_some() && (self.attention_bias || self.qk_norm.is_some()) {
            return Err(ArchError::not_built(
                "latent attention with attention_bias or qk_norm",
            ));
        }
        self.rope_scaling
            .as_ref()
            .map_or(Ok(()), RopeScaling::check)?;
        if matches!(self.rope_scaling, Some(RopeScaling::Yarn { .. })) && self.rope_theta <= 1.0 {
            return Err(ArchError::contradiction(
                format!("rope_theta = {} with yarn", self.rope_theta),
                "use more than 1",
            ));
        }
        if let Some(latent) = &self.latent {
            latent.check()?;
        }
        if let Some(window) = &self.sliding_window {
            within("sliding_window", window.sliding_window, POSITIONS)?;
            if let Some(theta) = window.rope_local_base_freq {
                positive("rope_local_base_freq", theta)?;
            }
        }
        self.moe
            .as_ref()
            .map_or(Ok(()), |moe| self.check_experts(moe))
    }

    /// Rejects what the planner knows of models of other frameworks, but no model here has.
    pub fn check_trainable(&self) -> Checked {
        if self.is_gpt2() {
            return Ok(());
        }
        let has_shared_gate = self.moe.as_ref().is_some_and(|moe| moe.has_shared_gate);
        let missing = [
            (
                !self.is_causal,
                "bidirectional attention without being a GPT-2",
            ),
            (self.norm == Norm::Layer, "LayerNorm without being a GPT-2"),
            (
                self.feed_forward == FeedForward::Plain,
                "feed-forward layers without a gate without being a GPT-2",
            ),
            (
                self.positions == Positions::Learned,
                "learned positions without being a GPT-2",
            ),
            (self.has_biases, "biases in every linear layer"),
            (has_shared_gate, "a gate of the shared experts"),
            (
                self.moe.is_some() && self.hidden_act != Activation::Silu,
                "experts with another function than silu",
            ),
        ];
        match missing.iter().find(|(has, _)| *has) {
            Some((_, what)) => Err(ArchError::not_built(format!("the model has {what}"))),
            None => Ok(()),
        }
    }

    fn check_experts(&self, moe: &MoeConfig) -> Checked {
        moe.check()?;
        if moe.first_k_dense_replace <= self.num_hidden_layers {
            return Ok(());
        }
        Err(ArchError::Range {
            key: "first_k_dense_replace".to_owned(),
            value: moe.first_k_dense_replace,
            limit: self.num_hidden_layers,
        })
    }

    fn check_sizes(&self) -> Checked {
        for (key, value, limit) in [
            ("vocab_size", self.vocab_size, WIDTH),
            ("hidden_size", self.hidden_size, WIDTH),
            ("intermediate_size", self.intermediate_size, WIDTH),
            ("num_hidden_layers", self.num_hidden_layers, LAYERS),
            ("num_attention_heads", self.num_attention_heads, WIDTH),
            ("num_key_value_heads", self.num_key_value_heads, WIDTH),
            ("head_dim", self.head_dim, WIDTH),
            (
                "max_position_embeddings",
                self.max_position_embeddings,
                POSITIONS,
            ),
        ] {
            within(key, value, limit)?;
        }
        let query_width = self.num_attention_heads.saturating_mul(self.head_dim);
        within("num_attention_heads x head_dim", query_width, WIDTH)
    }
}

impl MoeConfig {
    /// Rejects invalid settings.
    pub fn check(&self) -> Checked {
        within("num_experts", self.num_experts, EXPERTS)?;
        within("num_experts_per_tok", self.num_experts_per_tok, EXPERTS)?;
        within("moe_intermediate_size", self.moe_intermediate_size, WIDTH)?;
        let (all, chosen) = (self.num_experts, self.num_experts_per_tok);
        if chosen > all {
            return Err(ArchError::contradiction(
                format!("num_experts_per_tok = {chosen}, but num_experts = {all}"),
                format!("the nearest valid choice is num_experts_per_tok = {all}"),
            ));
        }
        if let Some(groups) = &self.groups {
            groups.check(all, chosen)?;
        }
        let width = all.saturating_mul(self.moe_intermediate_size);
        within("num_experts x moe_intermediate_size", width, WIDTH)?;
        let each = self.shared_expert_intermediate_size;
        let each = each.unwrap_or(self.moe_intermediate_size);
        let shared = self.n_shared_experts.saturating_mul(each).max(1);
        within(
            "n_shared_experts x shared_expert_intermediate_size",
            shared,
            WIDTH,
        )?;
        positive("routed_scaling_factor", self.routed_scaling_factor)?;
        for (key, value) in [
            ("router_aux_loss_coef", self.router_aux_loss_coef),
            ("router_z_loss_coef", self.router_z_loss_coef),
            ("bias_update_rate", self.bias_update_rate.unwrap_or(0.0)),
        ] {
            if !(0.0..=1e6).contains(&value) {
                let what = format!("{key} = {value}");
                return Err(ArchError::contradiction(what, "use 0 to 1000000"));
            }
        }
        self.capacity_factor
            .map_or(Ok(()), |factor| positive("capacity_factor", factor))
    }
}

impl LatentAttention {
    fn check(&self) -> Checked {
        for (key, value) in [
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
        ] {
            within(key, value, WIDTH)?;
        }
        let (rotated, values) = (self.qk_rope_head_dim, self.v_head_dim);
        if !rotated.is_multiple_of(2) {
            return Err(ArchError::contradiction(
                format!("qk_rope_head_dim = {rotated} is odd, but rotary embedding rotates pairs"),
                format!(
                    "the nearest valid choice is qk_rope_head_dim = {}",
                    rotated + 1
                ),
            ));
        }
        if values > self.qk_head_dim() {
            return Err(ArchError::not_built(format!(
                "v_head_dim = {values} is more than qk_nope_head_dim + qk_rope_head_dim = {}",
                self.qk_head_dim()
            )));
        }
        Ok(())
    }
}

impl RoutingGroups {
    fn check(&self, num_experts: usize, chosen: usize) -> Checked {
        let RoutingGroups {
            n_group,
            topk_group,
            score,
        } = *self;
        within("n_group", n_group, num_experts)?;
        within("topk_group", topk_group, n_group)?;
        let each = num_experts / n_group;
        let scored = match score {
            GroupScore::Best => 1,
            GroupScore::BestTwo => 2,
        };
        if num_experts.is_multiple_of(n_group) && each >= scored && topk_group * each >= chosen {
            return Ok(());
        }
        Err(ArchError::contradiction(
            format!(
                "n_group = {n_group}, topk_group = {topk_group}, but {num_experts} experts of which a token uses {chosen}"
            ),
            "use groups of equal size, of which a token may use enough to find its experts",
        ))
    }
}

impl RopeScaling {
    fn check(&self) -> Checked {
        let (factor, original, [low, high]) = match *self {
            RopeScaling::Linear { factor } => (factor, 1, [1.0, 2.0]),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => (
                factor,
                original_max_position_embeddings,
                [low_freq_factor, high_freq_factor],
            ),
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                ..
            } => (
                factor,
                original_max_position_embeddings,
                [beta_slow, beta_fast],
            ),
        };
        positive("rope_scaling.factor", factor)?;
        if let RopeScaling::Yarn {
            mscale,
            mscale_all_dim,
            attention_factor,
            ..
        } = *self
        {
            positive(
                "rope_scaling.attention_factor",
                attention_factor.unwrap_or(1.0),
            )?;
            let is_valid = |value: f64| (0.0..=1e6).contains(&value);
            if !is_valid(mscale) || !is_valid(mscale_all_dim) {
                return Err(ArchError::contradiction(
                    format!("rope_scaling: mscale = {mscale}, mscale_all_dim = {mscale_all_dim}"),
                    "use 0 to 1000000",
                ));
            }
        }
        within(
            "rope_scaling.original_max_position_embeddings",
            original,
            POSITIONS,
        )?;
        if low > 0.0 && low < high && high.is_finite() {
            return Ok(());
        }
        Err(ArchError::contradiction(
            format!("rope_scaling: the bounds of low and high frequencies are {low} and {high}"),
            "use positive ones, the lower first: Llama 3.1 has 1 and 4",
        ))
    }
}

fn within(key: &str, value: usize, limit: usize) -> Checked {
    if (1..=limit).contains(&value) {
        return Ok(());
    }
    let key = key.to_owned();
    Err(ArchError::Range { key, value, limit })
}

fn positive(key: &str, value: f64) -> Checked {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(ArchError::contradiction(
        format!("{key} = {value}"),
        "it must be a positive number",
    ))
}

/// The divisor of `number` nearest to `wanted`; of two equally near, the smaller.
pub fn nearest_divisor(number: usize, wanted: usize) -> usize {
    let wanted = wanted.min(number);
    (0..=number)
        .flat_map(|distance| [wanted.saturating_sub(distance), wanted + distance])
        .find(|&candidate| candidate > 0 && number.is_multiple_of(candidate))
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_nearest_divisor_divides(number in 1usize..500, wanted in 0usize..600) {
            let found = nearest_divisor(number, wanted);
            prop_assert_eq!(number % found, 0);
            for other in (1..=number).filter(|d| number % d == 0) {
                prop_assert!(found.abs_diff(wanted) <= other.abs_diff(wanted));
            }
        }
    }
}

//! Validation of expert parallelism against the model.

use trainyard_arch::MoeConfig;

use crate::{Config, ConfigError, ModelSpec};

impl Config {
    /// Rejects degrees and settings that do not fit the experts of the model. Expects validated degrees.
    pub(crate) fn check_experts(&self, model: &ModelSpec) -> Result<(), ConfigError> {
        let degree = self.parallelism.expert_parallel_degree;
        let Some(mixture) = model.experts() else {
            return match degree {
                1 => Ok(()),
                _ => Err(ConfigError::contradiction(
                    format!(
                        "parallelism.expert_parallel_degree = {degree}, but the model has no experts"
                    ),
                    "describe them in [model.moe], or use parallelism.expert_parallel_degree = 1",
                )),
            };
        };
        self.check_expert_ranks(mixture)?;
        self.check_capacity(mixture)?;
        Ok(())
    }

    fn check_expert_ranks(&self, mixture: &MoeConfig) -> Result<(), ConfigError> {
        let (tp, degree) = (
            self.num_tensor_ranks(),
            self.parallelism.expert_parallel_degree,
        );
        let ranks = usize::try_from(degree).unwrap_or(1);
        let number = mixture.num_experts;
        if !number.is_multiple_of(ranks) {
            let most = ranks.min(number);
            let nearest = (1..=most).rev().find(|&n| number.is_multiple_of(n));
            return Err(ConfigError::contradiction(
                format!(
                    "model.moe.num_experts = {number} is not divisible by \
                     parallelism.expert_parallel_degree = {degree}"
                ),
                format!(
                    "the nearest number that divides it is {}",
                    nearest.unwrap_or(1)
                ),
            ));
        }
        let local = self.parallelism.expert_parallel_local_degree;
        if local > 0 && !ranks.is_multiple_of(local) {
            return Err(ConfigError::contradiction(
                format!(
                    "parallelism.expert_parallel_degree = {degree} is no multiple of \
                     parallelism.expert_parallel_local_degree = {local}"
                ),
                "use a divisor of it, or 0 to take it from the launcher",
            ));
        }
        if tp > 1 && !self.parallelism.enable_sequence_parallel {
            return Err(ConfigError::not_built(
                "[model.moe] with tensor parallelism, but without sequence parallelism",
                "parallelism.enable_sequence_parallel = true",
            ));
        }
        let width = mixture.shared_width();
        if !width.is_multiple_of(tp) {
            return Err(ConfigError::contradiction(
                format!(
                    "shared experts of width {width} is not divisible by \
                     parallelism.tensor_parallel_degree = {tp}"
                ),
                "choose model.moe.moe_intermediate_size so that it divides",
            ));
        }
        Ok(())
    }

    /// The capacity of an expert is per sequence, so a rank must hold whole sequences.
    fn check_capacity(&self, mixture: &MoeConfig) -> Result<(), ConfigError> {
        let is_shared = self.num_tensor_ranks() > 1 || self.num_context_ranks() > 1;
        match (mixture.capacity_factor, is_shared) {
            (Some(factor), true) => Err(ConfigError::not_built(
                format!(
                    "model.moe.capacity_factor = {factor} where ranks share sequences \
                     (tensor_parallel_degree or context_parallel_degree)"
                ),
                "no model.moe.capacity_factor, so that no token is dropped",
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::Config;

    fn rejection(text: &str) -> String {
        match Config::parse(text, &[]) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    fn with_experts(text: &str) -> String {
        rejection(&format!("model.moe.num_experts = 6\n{text}"))
    }

    #[test]
    fn invalid_expert_settings_are_rejected_with_a_suggestion() {
        assert_eq!(with_experts("parallelism.expert_parallel_degree = 3"), "");
        for (text, conflict, remedy) in [
            (
                "parallelism.expert_parallel_degree = 4",
                "num_experts = 6",
                "divides it is 3",
            ),
            (
                "parallelism.expert_parallel_degree = 3\nparallelism.expert_parallel_local_degree = 2",
                "no multiple",
                "divisor",
            ),
            (
                "model.moe.num_experts_per_tok = 7",
                "num_experts = 6",
                "num_experts_per_tok = 6",
            ),
            (
                "parallelism.tensor_parallel_degree = 2\nparallelism.enable_sequence_parallel = false",
                "without sequence parallelism",
                "enable_sequence_parallel = true",
            ),
            (
                "model.moe.capacity_factor = 1.5\nparallelism.context_parallel_degree = 2",
                "capacity_factor = 1.5",
                "no token is dropped",
            ),
            (
                "model.moe.router_z_loss_coef = -1",
                "router_z_loss_coef = -1",
                "0",
            ),
        ] {
            let message = with_experts(text);
            assert!(message.contains(conflict), "{text}: {message}");
            assert!(message.contains(remedy), "{text}: {message}");
        }
        let message = rejection("parallelism.expert_parallel_degree = 2");
        assert!(message.contains("has no experts"), "{message}");
        let message = rejection("model.moe.n_shared_experts = 2");
        assert!(message.contains("model.moe.num_experts"), "{message}");
    }

    #[test]
    fn expert_parallelism_uses_the_inner_axes() {
        let text = "model.moe.num_experts = 8\nparallelism.expert_parallel_degree = 4\n\
                    parallelism.data_parallel_shard_degree = -1\n\
                    parallelism.tensor_parallel_degree = 2";
        let config = Config::parse(text, &[]).unwrap();
        let mesh = config.mesh(8).unwrap();
        assert_eq!((mesh.ep(), mesh.efsdp()), (4, 2));
        let message = config.mesh(6).unwrap_err().to_string();
        assert!(message.contains("ep 4 does not divide"), "{message}");
        assert_eq!(config.on_one_rank().mesh(1).unwrap().ep(), 1);
    }
}

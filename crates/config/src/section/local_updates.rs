//! `[local_updates]`: replicas that take optimizer steps of their own.

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::{GradientCompression, at_least_one, within};
use crate::ConfigError;

/// How replicas that take optimizer steps of their own are joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LocalUpdateMethod {
    /// There are none.
    #[default]
    #[serde(rename = "none")]
    None,
    /// Their parameters are averaged.
    #[serde(rename = "local_sgd")]
    LocalSgd,
    /// An outer optimizer with Nesterov momentum takes a step with the mean of their movements.
    #[serde(rename = "diloco")]
    Diloco,
    /// As `diloco` without momentum, with the largest of every 4096 movements in 2 bits.
    #[serde(rename = "sparse_loco")]
    SparseLoco,
}

/// `[local_updates]`, for the `data_parallel_outer_degree` replicas of `[parallelism]`, or for the workers of parameter servers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct LocalUpdatesSection {
    /// How replicas are joined.
    pub method: LocalUpdateMethod,
    /// Steps between two outer steps.
    pub sync_steps: u64,
    /// Before this step, replicas average their gradients in every step.
    pub start_step: u64,
    /// The learning rate of the outer optimizer; 0.7 for `diloco`, 1 otherwise.
    pub outer_lr: Option<f64>,
    /// The momentum of the outer optimizer; 0.9 for `diloco`, 0 otherwise.
    pub outer_momentum: Option<f64>,
    /// Whether the momentum of the outer optimizer is Nesterov's.
    pub outer_nesterov: bool,
    /// The number of parts of the model that are joined at different steps.
    pub num_fragments: usize,
    /// Steps during which the communication of a fragment overlaps with training.
    pub fragment_sync_delay: u64,
    /// The share of its own parameters that a replica keeps when a fragment arrives.
    pub fragment_update_alpha: f64,
    /// Compression of what replicas send.
    pub compression: GradientCompression,
    /// The share of numbers that `top_k`, `random_k` and `sparse_loco` send.
    pub compression_ratio: f64,
    /// The share of what earlier outer steps have not sent that is sent later.
    pub error_decay: f64,
    /// Workers of parameter servers that make an outer step; all if absent. The others are part of a later one.
    pub quorum: Option<u64>,
    /// How long an outer step waits for the others once there is a quorum.
    pub grace_seconds: f64,
}

impl Default for LocalUpdatesSection {
    fn default() -> Self {
        LocalUpdatesSection {
            method: LocalUpdateMethod::None,
            sync_steps: 100,
            start_step: 0,
            outer_lr: None,
            outer_momentum: None,
            outer_nesterov: true,
            num_fragments: 1,
            fragment_sync_delay: 0,
            fragment_update_alpha: 0.0,
            compression: GradientCompression::None,
            compression_ratio: 0.02,
            error_decay: 0.95,
            quorum: None,
            grace_seconds: 10.0,
        }
    }
}

impl LocalUpdatesSection {
    /// Learning rate and momentum of the outer optimizer.
    pub fn outer_optimizer(&self) -> (f64, f64) {
        let (lr, momentum) = match self.method {
            LocalUpdateMethod::Diloco => (0.7, 0.9),
            _ => (1.0, 0.0),
        };
        (
            self.outer_lr.unwrap_or(lr),
            self.outer_momentum.unwrap_or(momentum),
        )
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        at_least_one("local_updates.sync_steps", self.sync_steps)?;
        at_least_one("local_updates.num_fragments", self.num_fragments as u64)?;
        let alpha = self.fragment_update_alpha;
        within("local_updates.fragment_update_alpha", alpha, 0.0, 1.0)?;
        within("local_updates.error_decay", self.error_decay, 0.0, 1.0)?;
        let ratio = self.compression_ratio;
        within("local_updates.compression_ratio", ratio, 1.0 / 4096.0, 1.0)?;
        at_least_one("local_updates.quorum", self.quorum.unwrap_or(1))?;
        within("local_updates.grace_seconds", self.grace_seconds, 0.0, 1e6)?;
        let (lr, momentum) = self.outer_optimizer();
        within("local_updates.outer_lr", lr, 0.0, f64::INFINITY)?;
        within("local_updates.outer_momentum", momentum, 0.0, 1.0)?;
        let steps = self.sync_steps;
        for (key, value) in [
            ("fragment_sync_delay", self.fragment_sync_delay + 1),
            ("num_fragments", self.num_fragments as u64),
        ] {
            if value > steps {
                return Err(ConfigError::contradiction(
                    format!(
                        "local_updates.{key} does not fit into local_updates.sync_steps = {steps}"
                    ),
                    "use a larger local_updates.sync_steps",
                ));
            }
        }
        let is_averaged = self.method == LocalUpdateMethod::LocalSgd;
        if is_averaged && (self.outer_lr.is_some() || self.outer_momentum.is_some()) {
            return Err(ConfigError::contradiction(
                "local_updates.method = \"local_sgd\" averages parameters without an outer optimizer",
                "use local_updates.method = \"diloco\", or remove local_updates.outer_lr and local_updates.outer_momentum",
            ));
        }
        let is_sparse = self.method == LocalUpdateMethod::SparseLoco;
        if is_sparse && self.compression != GradientCompression::None {
            return Err(ConfigError::contradiction(
                "local_updates.method = \"sparse_loco\" has a compression of its own",
                "remove local_updates.compression",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::Config;

    fn rejection(keys: &str) -> String {
        let text = format!("local_updates.method = \"diloco\"\n{keys}");
        match Config::parse(&text, &[]) {
            Ok(_) => "accepted".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn what_cannot_be_combined_is_rejected() {
        for (keys, reason) in [
            ("local_updates.num_fragments = 200", "sync_steps"),
            ("local_updates.fragment_sync_delay = 100", "sync_steps"),
            ("local_updates.compression = \"power_sgd\"", "power_sgd"),
            ("parallelism.find_unused_parameters = true", "find_unused"),
            ("value_guard.spike_threshold = 4.0", "spike_threshold"),
            (
                "parallelism.data_parallel_shard_degree = -1\nparallelism.zero_stage = 1",
                "ZeRO stages 1 and 2",
            ),
            (
                "parallelism.tensor_parallel_degree = 2\nlocal_updates.compression = \"int8\"",
                "tensor",
            ),
            (
                "parallelism.pipeline_parallel_degree = 2\nlocal_updates.num_fragments = 2",
                "pipeline",
            ),
        ] {
            let found = rejection(keys);
            assert!(found.contains(reason), "{keys}: {found}");
        }
        assert_eq!(
            rejection("local_updates.compression = \"int8\""),
            "accepted"
        );
        let none = Config::parse("parallelism.data_parallel_outer_degree = 2", &[]);
        let found = none.unwrap_err().to_string();
        assert!(found.contains("joins no"), "{found}");
    }

    #[test]
    fn blocks_are_not_shared_by_tensor_parallel_ranks() {
        let text =
            "parallelism.tensor_parallel_degree = 2\nparallelism.gradient_compression = \"int8\"";
        let found = Config::parse(text, &[]).unwrap_err().to_string();
        assert!(found.contains("tensor parallelism"), "{found}");
    }
}

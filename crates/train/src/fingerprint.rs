//! The fingerprint of a job: what makes it the same job wherever it is started.

use trainyard_checkpoint::Digest;
use trainyard_config::Config;

use crate::error::{Result, TrainError};

/// A digest of what a job trains: the model, the data, the loss, the optimizer, the keys of components of the user's own, and
/// the seed. The mesh, the batch sizes and the
/// schedule may change within a job.
pub(crate) fn fingerprint(config: &Config) -> Result<String> {
    let training = &config.training;
    let identity = serde_json::json!({
        "model": config.model,
        "dataset": training.dataset,
        "dataset_path": training.dataset_path,
        "seq_len": training.seq_len,
        "loss": training.loss,
        "optimizer": config.optimizer.name,
        "custom": config.custom,
        "seed": config.debug.seed,
    });
    let text = serde_json::to_vec(&identity).map_err(|e| TrainError::Peers(e.to_string()))?;
    Ok(Digest::of(&text).to_string()[..16].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_what_is_trained_and_not_how() {
        let config = Config::default();
        let same = |change: fn(&mut Config)| {
            let mut other = config.clone();
            change(&mut other);
            fingerprint(&other).unwrap() == fingerprint(&config).unwrap()
        };
        assert!(same(|c| c.training.local_batch_size += 1));
        assert!(same(|c| c.parallelism.tensor_parallel_degree = 2));
        assert!(!same(|c| c.debug.seed += 1));
        assert!(!same(|c| c.training.seq_len += 1));
    }
}

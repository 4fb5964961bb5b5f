//! The configs of parameter servers and of their workers, which differ from that of the run in their parallelism only.

use crate::{
    Backend, Config, ConfigError, Dtype, GradientCompression, GuardPolicy, LocalUpdateMethod,
    Offload, ParallelismSection,
};

impl Config {
    /// The config of every one of `num_servers` servers, which shard the states over each other. The number of workers
    /// determines the global batch size if this config does not.
    pub fn for_servers(
        &self,
        num_servers: usize,
        num_workers: usize,
    ) -> Result<Config, ConfigError> {
        let default = self.training.local_batch_size.saturating_mul(num_workers);
        let global_batch = self.training.global_batch_size.unwrap_or(default);
        let mut server = self.for_worker(global_batch)?;
        server.parallelism.data_parallel_shard_degree =
            i64::try_from(num_servers).unwrap_or(i64::MAX);
        server.parallelism.zero_stage = 3;
        // States of servers are in host memory; GPUs are for workers.
        server.comm.backend = Backend::Gloo;
        server.batching(num_servers)?;
        Ok(server)
    }

    /// The config of a worker, which computes whole gradients of some micro-batches of a global batch.
    pub fn for_worker(&self, global_batch: usize) -> Result<Config, ConfigError> {
        self.check_served()?;
        let mut worker = self.clone();
        worker.training.global_batch_size = Some(global_batch);
        worker.parallelism.data_parallel_replicate_degree = 1;
        worker.parallelism.data_parallel_shard_degree = 1;
        worker.batching(1)?;
        Ok(worker)
    }

    /// Rejects what parameter servers do not have.
    fn check_served(&self) -> Result<(), ConfigError> {
        let parallelism = &self.parallelism;
        let default = ParallelismSection::default();
        let is_data_parallel_only = self.mesh(1).is_ok();
        for (is_rejected, what, instead) in [
            (
                !is_data_parallel_only,
                "parameter servers with tensor, context, pipeline or expert parallelism, or fixed degrees of data parallelism",
                "the default degrees of [parallelism]",
            ),
            (
                self.local_updates.method != LocalUpdateMethod::None,
                "parameter servers with [local_updates]",
                "local_updates.method = \"none\"",
            ),
            (
                parallelism.gradient_compression != GradientCompression::None
                    || parallelism.parameter_compression != default.parameter_compression,
                "parameter servers with compression",
                "parallelism.gradient_compression = \"none\"",
            ),
            (
                parallelism.offload != Offload::None,
                "parameter servers with offloaded states",
                "parallelism.offload = \"none\"",
            ),
            (
                self.value_guard.policy == GuardPolicy::Rollback,
                "parameter servers with value_guard.policy = \"rollback\"",
                "value_guard.policy = \"skip\"",
            ),
            (
                [self.training.compute_dtype(), self.reduce_dtype()].contains(&Dtype::Float16),
                "parameter servers with float16, which needs a loss scale that all workers share",
                "training.mixed_precision_param = \"bfloat16\"",
            ),
        ] {
            if is_rejected {
                return Err(ConfigError::not_built(what, instead));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::parse(text, &[]).unwrap()
    }

    #[test]
    fn servers_shard_and_workers_do_not() {
        let run = config("training.local_batch_size = 2");
        let server = run.for_servers(2, 4).unwrap();
        assert_eq!(server.training.global_batch_size, Some(8));
        let mesh = server.mesh(2).unwrap();
        assert_eq!(mesh.size(trainyard_mesh::Axis::DpShard), 2);
        let worker = run.for_worker(8).unwrap();
        assert_eq!(worker.batching(1).unwrap().num_microbatches, 4);
        assert!(run.for_servers(3, 4).is_err(), "8 samples over 3 servers");
    }

    #[test]
    fn what_servers_do_not_have_is_rejected() {
        for text in [
            "parallelism.tensor_parallel_degree = 2",
            "parallelism.gradient_compression = \"int8\"",
            "training.mixed_precision_param = \"float16\"",
            "parallelism.offload = \"cpu\"\nparallelism.data_parallel_shard_degree = -1",
        ] {
            assert!(config(text).for_worker(1).is_err(), "{text}");
        }
    }
}

//! The configs of parameter servers and of their workers, which follow from that of the run.
//!
//! With `[local_updates]`, a step of the servers is an outer step: its gradient is the mean movement of the workers in
//! `sync_steps` steps of their own, and the optimizer of the servers is the outer optimizer.

use crate::{
    Backend, Config, ConfigError, Dtype, GradientCompression, GuardPolicy, LocalUpdateMethod,
    LocalUpdatesSection, LrSchedulerSection, Offload, OptimizerName, OptimizerSection,
    ParallelismSection,
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
        if self.has_local_updates() {
            self.check_replicas(num_workers, global_batch)?;
            server.take_outer_steps(&self.local_updates);
        }
        server.batching(num_servers)?;
        Ok(server)
    }

    /// The config of a worker, which computes whole gradients of some micro-batches of a global batch, or takes steps of its
    /// own with this global batch.
    pub fn for_worker(&self, global_batch: usize) -> Result<Config, ConfigError> {
        self.check_served()?;
        let mut worker = self.clone();
        worker.training.global_batch_size = Some(global_batch);
        worker.parallelism.data_parallel_replicate_degree = 1;
        worker.parallelism.data_parallel_shard_degree = 1;
        worker.local_updates = LocalUpdatesSection::default();
        worker.batching(1)?;
        Ok(worker)
    }

    /// Whether replicas take steps of their own.
    pub fn has_local_updates(&self) -> bool {
        self.local_updates.method != LocalUpdateMethod::None
    }

    /// Rejects a global batch that workers cannot divide, and a number of steps without a last outer step.
    fn check_replicas(&self, num_workers: usize, global_batch: usize) -> Result<(), ConfigError> {
        let (local, sync_steps) = (
            self.training.local_batch_size,
            self.local_updates.sync_steps,
        );
        let share = num_workers.saturating_mul(local);
        if share == 0 || !global_batch.is_multiple_of(share) {
            return Err(ConfigError::contradiction(
                format!(
                    "training.global_batch_size = {global_batch} is not a multiple of training.local_batch_size = {local} \
                     times {num_workers} workers"
                ),
                format!("use training.global_batch_size = {}", share.max(1)),
            ));
        }
        if !self.training.steps.is_multiple_of(sync_steps) {
            return Err(ConfigError::contradiction(
                format!(
                    "training.steps = {} is not a multiple of local_updates.sync_steps = {sync_steps}",
                    self.training.steps
                ),
                format!(
                    "use training.steps = {}",
                    self.training.steps.div_ceil(sync_steps) * sync_steps
                ),
            ));
        }
        if self
            .local_updates
            .quorum
            .is_some_and(|quorum| quorum > num_workers as u64)
        {
            return Err(ConfigError::contradiction(
                format!("local_updates.quorum is larger than the number of workers, {num_workers}"),
                format!("use local_updates.quorum = {num_workers} or less"),
            ));
        }
        Ok(())
    }

    /// Makes every `sync_steps` steps of this config one, with the outer optimizer.
    fn take_outer_steps(&mut self, local_updates: &LocalUpdatesSection) {
        let sync_steps = local_updates.sync_steps;
        let (lr, momentum) = local_updates.outer_optimizer();
        self.optimizer = OptimizerSection {
            name: OptimizerName::Sgd.into(),
            lr,
            momentum,
            nesterov: Some(local_updates.outer_nesterov && momentum > 0.0),
            weight_decay: 0.0,
            ..OptimizerSection::default()
        };
        self.lr_scheduler = LrSchedulerSection::default();
        self.training.max_norm = 0.0;
        let global_batch = self.training.global_batch_size.unwrap_or(1);
        self.training.global_batch_size =
            Some(global_batch.saturating_mul(usize::try_from(sync_steps).unwrap_or(usize::MAX)));
        self.training.steps /= sync_steps;
        for steps in [
            &mut self.metrics.log_freq,
            &mut self.checkpoint.interval,
            &mut self.checkpoint.memory_interval,
            &mut self.validation.freq,
            &mut self.validation.steps,
            &mut self.value_guard.digest_interval,
            &mut self.profiling.profile_freq,
        ] {
            *steps = steps.div_ceil(sync_steps);
        }
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
        if self.has_local_updates() {
            return self.check_served_local_updates();
        }
        Ok(())
    }

    /// Rejects local updates that workers of parameter servers do not have.
    fn check_served_local_updates(&self) -> Result<(), ConfigError> {
        let section = &self.local_updates;
        for (is_rejected, what, instead) in [
            (
                section.compression != GradientCompression::None
                    || section.method == LocalUpdateMethod::SparseLoco,
                "parameter servers with compressed local updates",
                "local_updates.method = \"diloco\" and local_updates.compression = \"none\"",
            ),
            (
                section.num_fragments > 1 || section.fragment_sync_delay > 0,
                "parameter servers with fragments of local updates",
                "local_updates.num_fragments = 1 and local_updates.fragment_sync_delay = 0",
            ),
            (
                section.start_step > 0,
                "parameter servers with local_updates.start_step",
                "local_updates.start_step = 0",
            ),
            (
                self.parameter_server.balance_batches,
                "parameter_server.balance_batches with [local_updates]",
                "local_updates.quorum",
            ),
            (
                self.training.epochs.is_some(),
                "training.epochs with parameter servers and [local_updates]",
                "training.steps",
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

    const DILOCO: &str = "training.steps = 100\ntraining.local_batch_size = 2\nlocal_updates.method = \"diloco\"\n\
        local_updates.sync_steps = 20\nlr_scheduler.warmup_steps = 10\n";

    #[test]
    fn a_step_of_servers_is_an_outer_step() {
        let run = config(&format!("{DILOCO}checkpoint.interval = 50\n"));
        let server = run.for_servers(2, 4).unwrap();
        server.check().unwrap();
        assert_eq!(server.training.steps, 5);
        assert_eq!(server.training.global_batch_size, Some(20 * 8));
        assert_eq!(server.checkpoint.interval, 3);
        assert_eq!(server.checkpoint.memory_interval, 0, "it stays off");
        let OptimizerSection {
            lr,
            momentum,
            nesterov,
            ..
        } = server.optimizer;
        assert_eq!((lr, momentum, nesterov), (0.7, 0.9, Some(true)));
        assert!(!server.has_local_updates());
        let worker = run.for_worker(2).unwrap();
        assert_eq!(worker.training.steps, 100);
        assert_eq!(worker.optimizer, run.optimizer);
        assert!(!worker.has_local_updates());
    }

    #[test]
    fn replicas_that_do_not_fit_are_rejected() {
        for (text, num_workers) in [
            ("training.global_batch_size = 6", 2),
            ("training.steps = 90", 2),
            ("local_updates.quorum = 3", 2),
            ("local_updates.num_fragments = 2", 2),
            ("local_updates.compression = \"int8\"", 2),
            ("parameter_server.balance_batches = true", 2),
        ] {
            let text = match text {
                "training.steps = 90" => DILOCO.replace("training.steps = 100", text),
                text => format!("{DILOCO}{text}"),
            };
            assert!(config(&text).for_servers(1, num_workers).is_err(), "{text}");
        }
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

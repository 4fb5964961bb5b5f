//! The configs of parameter servers and of their workers, which follow from that of the run.
//!
//! With `[local_updates]`, a step of the servers is an outer step: its gradient is the mean movement of the workers in
//! `sync_steps` steps of their own, and the optimizer of the servers is the outer optimizer. Such a worker may be a mesh of several
//! ranks.

use std::num::NonZero;

use trainyard_mesh::{Axis, AxisSet};

use crate::{
    Backend, Config, ConfigError, Dtype, GradientCompression, GuardPolicy, LocalUpdateMethod,
    LocalUpdatesSection, LrSchedulerSection, Offload, OptimizerName, OptimizerSection,
    ParallelismSection,
};

/// The workers that a run with parameter servers starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workers {
    /// How many there are.
    pub num: usize,
    /// The ranks of each of them.
    pub ranks_each: usize,
}

impl Workers {
    /// Divides ranks among workers; `None` if some would be left over.
    pub fn of_ranks(num_ranks: usize, ranks_each: NonZero<usize>) -> Option<Workers> {
        let ranks_each = ranks_each.get();
        num_ranks.is_multiple_of(ranks_each).then(|| Workers {
            num: num_ranks / ranks_each,
            ranks_each,
        })
    }
}

impl Config {
    /// The config of every one of `num_servers` servers, which shard the states over each other. The workers determine the
    /// global batch size if this config does not.
    pub fn for_servers(&self, num_servers: usize, workers: Workers) -> Result<Config, ConfigError> {
        self.check_served(workers.ranks_each)?;
        let global_batch = self.global_batch_of(workers)?;
        let mut server = self.on_one_rank();
        server.training.global_batch_size = Some(global_batch);
        server.local_updates = LocalUpdatesSection::default();
        server.parallelism.data_parallel_shard_degree =
            i64::try_from(num_servers).unwrap_or(i64::MAX);
        server.parallelism.zero_stage = 3;
        // States of servers are in host memory; GPUs are for workers.
        server.comm.backend = Backend::Gloo;
        if self.has_local_updates() {
            self.check_replicas(workers, global_batch)?;
            server.take_outer_steps(&self.local_updates);
        }
        server.batching(num_servers)?;
        Ok(server)
    }

    /// The config of a worker of some ranks, which computes whole gradients of some micro-batches of a global batch, or takes
    /// steps of its own with this global batch.
    pub fn for_worker(&self, global_batch: usize, num_ranks: usize) -> Result<Config, ConfigError> {
        self.check_served(num_ranks)?;
        let mut worker = self.clone();
        worker.training.global_batch_size = Some(global_batch);
        if !self.has_local_updates() {
            worker.parallelism.data_parallel_replicate_degree = 1;
            worker.parallelism.data_parallel_shard_degree = 1;
        }
        worker.local_updates = LocalUpdatesSection::default();
        worker.batching(self.worker_data_ranks(num_ranks)?)?;
        Ok(worker)
    }

    /// The samples of a step of all workers: one micro-batch of every data-parallel rank, unless the config says more.
    pub fn global_batch_of(&self, workers: Workers) -> Result<usize, ConfigError> {
        let at_once = self.samples_at_once(workers)?;
        Ok(self.training.global_batch_size.unwrap_or(at_once))
    }

    fn samples_at_once(&self, workers: Workers) -> Result<usize, ConfigError> {
        let num_ranks = self.worker_data_ranks(workers.ranks_each)?;
        let local = self.training.local_batch_size;
        Ok(local.saturating_mul(num_ranks).saturating_mul(workers.num))
    }

    /// The number of ranks over which a worker divides its batch.
    fn worker_data_ranks(&self, num_ranks: usize) -> Result<usize, ConfigError> {
        Ok(self.mesh(num_ranks)?.size_of(AxisSet::of(Axis::DATA)))
    }

    /// Whether replicas take steps of their own.
    pub fn has_local_updates(&self) -> bool {
        self.local_updates.method != LocalUpdateMethod::None
    }

    /// Rejects a global batch that workers cannot divide, and a number of steps without a last outer step.
    fn check_replicas(&self, workers: Workers, global_batch: usize) -> Result<(), ConfigError> {
        let num_workers = workers.num;
        let samples_at_once = self.samples_at_once(workers)?;
        let sync_steps = self.local_updates.sync_steps;
        if samples_at_once == 0 || !global_batch.is_multiple_of(samples_at_once) {
            return Err(ConfigError::contradiction(
                format!(
                    "training.global_batch_size = {global_batch} is not a multiple of {samples_at_once}: \
                     training.local_batch_size = {} on every data-parallel rank of {num_workers} workers",
                    self.training.local_batch_size
                ),
                format!(
                    "use training.global_batch_size = {}",
                    samples_at_once.max(1)
                ),
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
        ] {
            *steps = steps.div_ceil(sync_steps);
        }
    }

    /// Rejects what parameter servers and their workers of this many ranks do not have.
    pub fn check_served(&self, num_ranks: usize) -> Result<(), ConfigError> {
        let parallelism = &self.parallelism;
        let default = ParallelismSection::default();
        let is_one_rank = num_ranks == 1 && self.mesh(1).is_ok();
        for (is_rejected, what, instead) in [
            (
                !is_one_rank && !self.has_local_updates(),
                "workers of several ranks (degrees of [parallelism], --nproc-per-worker) that push gradients",
                "[local_updates], with which they push movements, or one rank per worker",
            ),
            (
                parallelism.data_parallel_outer_degree != 1,
                "parallelism.data_parallel_outer_degree with parameter servers, whose workers are the replicas",
                "parallelism.data_parallel_outer_degree = 1",
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

    /// Four workers of one rank.
    const SINGLE: Workers = Workers {
        num: 4,
        ranks_each: 1,
    };

    fn config(text: &str) -> Config {
        Config::parse(text, &[]).unwrap()
    }

    #[test]
    fn servers_shard_and_workers_do_not() {
        let run = config("training.local_batch_size = 2");
        let server = run.for_servers(2, SINGLE).unwrap();
        assert_eq!(server.training.global_batch_size, Some(8));
        let mesh = server.mesh(2).unwrap();
        assert_eq!(mesh.size(Axis::DpShard), 2);
        let worker = run.for_worker(8, 1).unwrap();
        assert_eq!(worker.batching(1).unwrap().num_microbatches, 4);
        let servers = run.for_servers(3, SINGLE);
        assert!(servers.is_err(), "8 samples over 3 servers");
    }

    const DILOCO: &str = "training.steps = 100\ntraining.local_batch_size = 2\nlocal_updates.method = \"diloco\"\n\
        local_updates.sync_steps = 20\nlr_scheduler.warmup_steps = 10\n";

    #[test]
    fn a_step_of_servers_is_an_outer_step() {
        let run = config(&format!("{DILOCO}checkpoint.interval = 50\n"));
        let server = run.for_servers(2, SINGLE).unwrap();
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
        let worker = run.for_worker(2, 1).unwrap();
        assert_eq!(worker.training.steps, 100);
        assert_eq!(worker.optimizer, run.optimizer);
        assert!(!worker.has_local_updates());
    }

    #[test]
    fn a_replica_is_a_mesh() {
        let text =
            "parallelism.data_parallel_shard_degree = 2\nparallelism.tensor_parallel_degree = 2\n";
        let run = config(&format!("{DILOCO}{text}"));
        let workers = Workers {
            num: 3,
            ranks_each: 4,
        };
        let server = run.for_servers(1, workers).unwrap();
        let outer_batch = 20 * 3 * 2 * 2;
        assert_eq!(server.training.global_batch_size, Some(outer_batch));
        assert_eq!(server.mesh(1).unwrap().world_size(), 1);
        let worker = run.for_worker(4, 4).unwrap();
        assert_eq!(worker.mesh(4).unwrap(), run.mesh(4).unwrap());
        assert!(run.for_worker(4, 6).is_err(), "6 ranks have another mesh");
        let outer = config(&format!(
            "{DILOCO}parallelism.data_parallel_outer_degree = 2"
        ));
        assert!(outer.for_worker(4, 2).is_err(), "workers are the replicas");
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
            let workers = Workers {
                num: num_workers,
                ranks_each: 1,
            };
            assert!(config(&text).for_servers(1, workers).is_err(), "{text}");
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
            assert!(config(text).for_worker(1, 1).is_err(), "{text}");
        }
        assert!(config("").for_worker(2, 2).is_err(), "gradients of a mesh");
    }
}

//! The steps that a worker takes with an optimizer of its own between two outer steps.

use tch::Tensor;
use trainyard_config::Config;
use trainyard_data::{Batch, SampleStream};
use trainyard_parallel::scaled;
use trainyard_param_server::{JobInfo, Piece};
use trainyard_torch::scalar;

use crate::error::{Result, TrainError};
use crate::trainer::Trainer;

/// How the samples of an outer step are divided: every one of its steps has a global batch, and every replica has the same share
/// of all of them.
#[derive(Clone, Copy)]
pub(super) struct LocalSteps {
    sync_steps: u64,
    num_replicas: usize,
    /// Samples of one step of all replicas.
    global_batch: usize,
}

impl LocalSteps {
    /// `None` if workers take no steps of their own.
    pub(super) fn new(run: &Config, job: &JobInfo) -> Option<LocalSteps> {
        let sync_steps = run.local_updates.sync_steps;
        run.has_local_updates().then_some(LocalSteps {
            sync_steps,
            num_replicas: job.pieces_per_step,
            global_batch: job.global_batch / sync_steps as usize,
        })
    }

    /// Samples of one step of this replica.
    pub(super) fn replica_batch(self) -> usize {
        self.global_batch / self.num_replicas
    }

    /// Takes the steps of a piece. Returns the summed loss, divided by the nominal number of targets of the outer step, and the
    /// number of targets.
    pub(super) fn take(
        self,
        trainer: &mut Trainer,
        samples: &SampleStream,
        piece: Piece,
    ) -> Result<(Tensor, i64)> {
        let first = trainer.parameters().first();
        let first = first.ok_or(TrainError::NoParameters)?;
        let (mut loss, mut num_targets) = (scalar::double_like(first.tensor(), 0.0)?, 0);
        for step in piece.step * self.sync_steps..(piece.step + 1) * self.sync_steps {
            let batches = self.batches(trainer, samples, step, piece.first)?;
            let num: i64 = batches.iter().map(|batch| batch.num_targets).sum();
            let num_microbatches = trainer.batching().num_microbatches;
            trainer.seek(
                step,
                self.global_batch,
                piece.first as usize * num_microbatches,
            );
            let outcome = trainer.step(&batches)?;
            let share = scaled(&outcome.local_loss, self.weight(trainer, num))?;
            loss = loss.f_add(&share)?;
            num_targets += num;
        }
        trainer.wait_pending()?;
        Ok((loss, num_targets))
    }

    /// The share of these targets in those of an outer step, if every position has one.
    pub(super) fn weight(self, trainer: &Trainer, num_targets: i64) -> f64 {
        let num_steps = self.sync_steps as f64 * self.num_replicas as f64;
        num_targets as f64 / (trainer.nominal_targets() * num_steps)
    }

    /// The micro-batches of a replica in a step.
    fn batches(
        self,
        trainer: &Trainer,
        samples: &SampleStream,
        step: u64,
        replica: u64,
    ) -> Result<Vec<Batch>> {
        let local = trainer.batching().local as u64;
        let first = step * self.global_batch as u64 + replica * self.replica_batch() as u64;
        let microbatches = 0..trainer.batching().num_microbatches as u64;
        let batch = |index: u64| {
            let first = first + index * local;
            Ok(samples.batch(first..first + local)?)
        };
        microbatches.map(batch).collect()
    }
}

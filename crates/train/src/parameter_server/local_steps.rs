//! The steps that a worker takes with an optimizer of its own between two outer steps.

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
    /// number of targets. This is a collective call.
    pub(super) fn take(
        self,
        trainer: &mut Trainer,
        samples: &SampleStream,
        piece: Piece,
    ) -> Result<(f64, i64)> {
        let first = trainer.parameters().first();
        let first = first.ok_or(TrainError::NoParameters)?;
        let (mut loss, mut num_targets) = (scalar::double_like(first.tensor(), 0.0)?, 0);
        for step in piece.step * self.sync_steps..(piece.step + 1) * self.sync_steps {
            let first = first_microbatch(trainer, piece.first);
            trainer.seek(step, self.global_batch, first);
            let batches = self.batches(trainer, samples, step, first)?;
            let outcome = trainer.step(&batches)?;
            let weight = self.weight(trainer, outcome.num_targets);
            loss = loss.f_add(&scaled(&outcome.local_loss, weight)?)?;
            num_targets += outcome.num_targets;
        }
        trainer.wait_pending()?;
        Ok((trainer.global_loss(&loss)?, num_targets))
    }

    /// The share of these targets in those of an outer step, if every position has one.
    pub(super) fn weight(self, trainer: &Trainer, num_targets: i64) -> f64 {
        let num_steps = self.sync_steps as f64 * self.num_replicas as f64;
        num_targets as f64 / (trainer.nominal_targets() * num_steps)
    }

    /// The micro-batches of this rank in a step, from number `first` of all replicas on.
    fn batches(
        self,
        trainer: &Trainer,
        samples: &SampleStream,
        step: u64,
        first: usize,
    ) -> Result<Vec<Batch>> {
        let batching = trainer.batching();
        let local = batching.local as u64;
        let batch = |number: usize| {
            let first = step * self.global_batch as u64 + number as u64 * local;
            Ok(samples.batch(first..first + local)?)
        };
        (first..first + batching.num_microbatches)
            .map(batch)
            .collect()
    }
}

/// The first micro-batch of this rank, counted from the first one of all replicas.
fn first_microbatch(trainer: &Trainer, replica: u64) -> usize {
    let group = trainer.data_group();
    let shares_before = replica as usize * group.size() + group.index();
    shares_before * trainer.batching().num_microbatches
}

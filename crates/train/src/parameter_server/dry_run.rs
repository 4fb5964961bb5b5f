//! Dry runs of a parameter server and of a worker.

use serde::Serialize;
use trainyard_data::Batch;
use trainyard_nn::Device;
use trainyard_torch::memory;
use trainyard_trace::{Ledger, MemoryKind};

use super::exchanged_bytes::{exchanged_for_rows, row_number_bytes};
use super::shards::{lookup_tables, max_rows};
use super::transfers::Transfers;
use crate::dry_run::{DryRun, dry_run_with, empty_batch, empty_batches};
use crate::error::Result;
use crate::sample_layout::SampleLayout;
use crate::train_spec::TrainSpec;
use crate::trainer::Trainer;

/// What a server and a worker do in a step.
#[derive(Debug, Clone, Serialize)]
pub struct ServedDryRun {
    /// A worker: it pulls parameters, computes the gradients of a piece and pushes them. If workers take steps of their own, it is
    /// one of these steps, with the pull and the push between which it lies.
    pub worker: DryRun,
    /// A server: it updates its shards with the gradients of a step.
    pub server: DryRun,
}

/// Simulates the first of `num_servers` servers, and one of `num_workers` workers.
pub fn dry_run(run: &TrainSpec, num_servers: usize, num_workers: usize) -> Result<ServedDryRun> {
    let server = run.with_config(run.for_servers(num_servers, num_workers)?);
    let global_batch = server.training.global_batch_size.unwrap_or(1);
    let microbatches = global_batch / server.training.local_batch_size;
    let worker = if run.has_local_updates() {
        let num_shares = num_workers * run.local_updates.sync_steps as usize;
        let worker = run.with_config(run.for_worker(global_batch / num_shares)?);
        let batches = |trainer: &Trainer| empty_batches(&worker, trainer, Device::Meta);
        dry_run_with(&worker, (1, 0), batches, |trainer, batches, ledger| {
            exchange(trainer, ledger, (run, num_servers, batches), |trainer| {
                trainer.step(batches).map(drop)
            })
        })?
    } else {
        let worker = run.with_config(run.for_worker(global_batch)?);
        let num = microbatches.div_ceil(num_workers);
        let batches = |trainer: &Trainer| {
            let (layout, local) = (SampleLayout::of(&worker)?, trainer.batching().local);
            let batches = (0..num).map(|_| empty_batch(&layout, local, Device::Meta));
            batches.collect()
        };
        dry_run_with(&worker, (1, 0), batches, |trainer, batches, ledger| {
            exchange(trainer, ledger, (run, num_servers, batches), |trainer| {
                drop(trainer.gradients(batches, 0, 0)?);
                Ok(trainer.model().zero_grad()?)
            })
        })
        .map(without_steps)?
    };
    let none = |_: &Trainer| Ok(Vec::new());
    Ok(ServedDryRun {
        worker,
        server: dry_run_with(&server, (num_servers, 0), none, |trainer, _, _| {
            update(trainer)
        })?,
    })
}

/// A worker that takes no steps has no optimizer, and keeps no gradient that it has pushed.
fn without_steps(mut worker: DryRun) -> DryRun {
    worker.states_by_formula.gradients = 0;
    worker.states_by_formula.optimizer = 0;
    worker
}

/// Pulls parameters, computes, and pushes gradients. All tokens are different, as far as the vocabulary allows, so real samples have
/// fewer rows of tables.
fn exchange(
    trainer: &mut Trainer,
    ledger: &Ledger,
    (run, num_servers, batches): (&TrainSpec, usize, &[Batch]),
    compute: impl FnOnce(&mut Trainer) -> Result<()>,
) -> Result<()> {
    let mut transfers = Transfers::new(ledger, num_servers);
    let tables = lookup_tables(run, trainer.model());
    let num_tokens: usize = batches.iter().map(|batch| batch.inputs.numel()).sum();
    let num_rows = num_tokens.min(max_rows(trainer.parameters(), &tables));
    let bytes = exchanged_for_rows(trainer.parameters(), &tables, num_rows, num_servers);
    let numbers = row_number_bytes(num_rows, num_servers);
    transfers.pulled(bytes.pulled, numbers, transfers.now_ns());
    compute(trainer)?;
    transfers.pushed(bytes.pushed, transfers.now_ns());
    Ok(())
}

/// Updates the parameters with gradients that have arrived.
fn update(trainer: &mut Trainer) -> Result<()> {
    for parameter in trainer.parameters() {
        if parameter.is_trainable() {
            let values = parameter.tensor().f_detach()?;
            let gradient = memory::scope(MemoryKind::Gradient, || values.f_zeros_like())?;
            parameter.set_gradient(Some(gradient));
        }
    }
    let learning_rate = trainer.next_learning_rate();
    drop(trainer.update(1.0, learning_rate)?);
    for parameter in trainer.parameters() {
        parameter.set_gradient(None);
    }
    Ok(())
}

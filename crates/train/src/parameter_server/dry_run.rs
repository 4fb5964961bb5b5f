//! Dry runs of a parameter server and of a worker.

use std::collections::HashSet;

use serde::Serialize;
use trainyard_config::Workers;
use trainyard_nn::Device;
use trainyard_torch::memory;
use trainyard_trace::MemoryKind;

use super::exchanged_bytes::{ExchangedBytes, exchanged_for_rows, row_number_bytes};
use super::shards::{lookup_tables, max_rows};
use super::transfers::Transfers;
use crate::dry_run::{DryRun, dry_run_with, empty_batch, empty_batches, fake_world};
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

/// Simulates the first of `num_servers` servers, and the first rank of a worker.
pub fn dry_run(run: &TrainSpec, num_servers: usize, workers: Workers) -> Result<ServedDryRun> {
    let config = run.with_config(run.for_servers(num_servers, workers)?);
    let global_batch = config.training.global_batch_size.unwrap_or(1);
    let mut whole = ExchangedBytes::default();
    let none = |_: &Trainer| Ok(Vec::new());
    let server = dry_run_with(
        &fake_world(&config, num_servers, 0)?,
        &config,
        none,
        |trainer, _, _| {
            whole = exchanged_for_rows(trainer.parameters(), &HashSet::new(), 0, num_servers);
            update(trainer)
        },
    )?;
    let worker = if run.has_local_updates() {
        let num_shares = workers.num * run.local_updates.sync_steps as usize;
        replica(
            run,
            (global_batch / num_shares, workers),
            num_servers,
            whole,
        )?
    } else {
        let microbatches = global_batch / config.training.local_batch_size;
        gradients(
            run,
            global_batch,
            microbatches.div_ceil(workers.num),
            num_servers,
        )?
    };
    Ok(ServedDryRun { worker, server })
}

/// A worker that takes a step of its own.
fn replica(
    run: &TrainSpec,
    (batch, workers): (usize, Workers),
    num_servers: usize,
    whole: ExchangedBytes,
) -> Result<DryRun> {
    let num_ranks = workers.ranks_each;
    let worker = run.with_config(run.for_worker(batch, num_ranks)?);
    let batches = |trainer: &Trainer| empty_batches(&worker, trainer, Device::Meta);
    let world = fake_world(&worker, num_ranks, 0)?;
    dry_run_with(&world, &worker, batches, |trainer, batches, ledger| {
        let transfers = Transfers::new(ledger, num_servers);
        exchange(transfers, (whole, 0), || trainer.step(batches).map(drop))
    })
}

/// A worker that computes the gradients of a piece. All tokens are different, as far as the vocabulary allows, so real samples
/// have fewer rows of tables.
fn gradients(
    run: &TrainSpec,
    global_batch: usize,
    num_microbatches: usize,
    num_servers: usize,
) -> Result<DryRun> {
    let worker = run.with_config(run.for_worker(global_batch, 1)?);
    let batches = |trainer: &Trainer| {
        let (layout, local) = (SampleLayout::of(&worker)?, trainer.batching().local);
        let batches = (0..num_microbatches).map(|_| empty_batch(&layout, local, Device::Meta));
        batches.collect()
    };
    let world = fake_world(&worker, 1, 0)?;
    dry_run_with(&world, &worker, batches, |trainer, batches, ledger| {
        let tables = lookup_tables(run, trainer.model());
        let num_tokens: usize = batches.iter().map(|batch| batch.inputs.numel()).sum();
        let num_rows = num_tokens.min(max_rows(trainer.parameters(), &tables));
        let bytes = exchanged_for_rows(trainer.parameters(), &tables, num_rows, num_servers);
        let numbers = row_number_bytes(num_rows, num_servers);
        let transfers = Transfers::new(ledger, num_servers);
        exchange(transfers, (bytes, numbers), || {
            drop(trainer.gradients(batches, 0, 0)?);
            Ok(trainer.model().zero_grad()?)
        })
    })
    .map(without_steps)
}

/// A worker that takes no steps has no optimizer, and keeps no gradient that it has pushed.
fn without_steps(mut worker: DryRun) -> DryRun {
    worker.states_by_formula.gradients = 0;
    worker.states_by_formula.optimizer = 0;
    worker
}

/// Pulls parameters, computes, and pushes gradients or movements; a request to pull has `num_sent` bytes.
fn exchange(
    mut transfers: Transfers,
    (bytes, num_sent): (ExchangedBytes, u64),
    compute: impl FnOnce() -> Result<()>,
) -> Result<()> {
    transfers.pulled(bytes.pulled, num_sent, transfers.now_ns());
    compute()?;
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

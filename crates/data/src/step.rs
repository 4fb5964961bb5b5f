//! The micro-batches of one step, loaded synchronously.

use tch::Device;

use crate::{Batch, DataError, Sampler, Source, collate};

/// The micro-batches of `rank` in `step`, loaded without threads, for tests and benchmarks.
pub fn step_batches(
    source: &dyn Source,
    sampler: &Sampler,
    step: u64,
    rank: usize,
    device: Device,
) -> Result<Vec<Batch>, DataError> {
    (0..sampler.num_microbatches())
        .map(|microbatch| {
            let samples = sampler
                .positions(step, microbatch, rank as u64)?
                .map(|index| source.sample(index))
                .collect::<Result<Vec<_>, _>>()?;
            collate(&samples, device)
        })
        .collect()
}

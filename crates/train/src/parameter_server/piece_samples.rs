//! The samples of a piece, and the rows of embedding tables that they look up.

use std::ops::Range;

use tch::{Device, Kind};
use trainyard_config::Batching;
use trainyard_data::{Batch, SampleStream};
use trainyard_param_server::{Piece, Rows};

use crate::build::{self, Phase};
use crate::error::Result;
use crate::job;
use crate::train_spec::TrainSpec;

/// The samples of a run, by pieces.
#[derive(Clone)]
pub(super) struct PieceSamples {
    pub stream: SampleStream,
    /// Samples of a step.
    global_batch: u64,
    /// Samples of a micro-batch.
    local_batch: u64,
}

impl PieceSamples {
    /// The training samples of a worker.
    pub(super) fn open(
        spec: &TrainSpec,
        batching: &Batching,
        device: Device,
    ) -> Result<PieceSamples> {
        let source = build::source(spec, Phase::Training)?;
        let stream = SampleStream {
            order: job::order(spec, Phase::Training, &*source),
            source,
            device,
        };
        Ok(PieceSamples {
            stream,
            global_batch: batching.global as u64,
            local_batch: batching.local as u64,
        })
    }

    /// The micro-batches of a piece.
    pub(super) fn batches(&self, piece: Piece) -> Result<Vec<Batch>> {
        let microbatches = piece.first..piece.first + piece.num;
        let batch = |microbatch| Ok(self.stream.batch(self.positions(piece.step, microbatch))?);
        microbatches.map(batch).collect()
    }

    fn positions(&self, step: u64, microbatch: u64) -> Range<u64> {
        let first = step * self.global_batch + microbatch * self.local_batch;
        first..first + self.local_batch
    }
}

/// The rows that a model reads which looks up all inputs.
pub(super) fn rows_of(batches: &[Batch], max_rows: usize) -> Result<Rows> {
    let mut numbers = Vec::new();
    for batch in batches {
        let inputs = batch.host_inputs.f_to_kind(Kind::Int64)?;
        numbers.extend(Vec::<i64>::try_from(inputs.f_flatten(0, -1)?)?);
    }
    Ok(Rows::new(numbers, max_rows))
}

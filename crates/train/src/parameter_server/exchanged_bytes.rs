//! What workers exchange with servers, by the closed form.
//!
//! Every piece is a pull of all parameters and a push of all gradients; of embedding tables, of the rows that it looks up.

use std::collections::HashSet;

use trainyard_nn::Parameter;
use trainyard_param_server::{Piece, Rows, WorkQueueOptions};

use super::Service;
use super::gradient_server::queue_options;
use super::piece_samples::{PieceSamples, rows_of};
use super::shards::{lookup_tables, max_rows};
use crate::error::Result;
use crate::train_spec::TrainSpec;
use crate::trainer::Trainer;

/// Bytes that workers exchange with all servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExchangedBytes {
    /// Gradients, or movements, that workers push, with the numbers of rows.
    pub pushed: u64,
    /// Parameters that workers pull.
    pub pulled: u64,
}

/// The bytes of the numbers of rows, which every server receives.
pub(super) fn row_number_bytes(num_rows: usize, num_servers: usize) -> u64 {
    (num_servers * Rows::num_bytes(num_rows)) as u64
}

/// The bytes of the first `num_steps` steps of `num_servers` servers, of which `trainer` is one, if no worker is lost.
pub fn exchanged_bytes(
    run: &TrainSpec,
    service: Service<'_>,
    trainer: &Trainer,
    (num_steps, num_servers): (u64, usize),
) -> Result<ExchangedBytes> {
    let num_microbatches = trainer.batching().num_global_microbatches();
    let options = queue_options(service, num_microbatches, num_steps);
    let tables = lookup_tables(service.run, trainer.model());
    let max_rows = max_rows(trainer.parameters(), &tables);
    let samples = if tables.is_empty() {
        None
    } else {
        Some(PieceSamples::open(
            run,
            trainer.batching(),
            tch::Device::Cpu,
        )?)
    };
    let mut sum = ExchangedBytes::default();
    for piece in (0..num_steps).flat_map(|step| pieces(&options, step)) {
        let num_rows = match &samples {
            Some(samples) => rows_of(&samples.batches(piece)?, max_rows)?.len(),
            None => 0,
        };
        let of_piece = exchanged_for_rows(trainer.parameters(), &tables, num_rows, num_servers);
        sum.pushed += of_piece.pushed;
        sum.pulled += of_piece.pulled;
    }
    Ok(sum)
}

/// The bytes of a piece that looks up this many rows of every table.
pub(super) fn exchanged_for_rows(
    parameters: &[Parameter],
    tables: &HashSet<String>,
    num_rows: usize,
    num_servers: usize,
) -> ExchangedBytes {
    let bytes = |parameter: &Parameter| {
        let (shape, element) = (parameter.shape(), parameter.kind().elt_size_in_bytes());
        let elements = match shape.split_first() {
            Some((&height, row)) if tables.contains(parameter.name()) => {
                num_rows.min(height) * row.iter().product::<usize>()
            }
            _ => shape.iter().product(),
        };
        (elements * element) as u64
    };
    let trained = parameters
        .iter()
        .filter(|parameter| parameter.is_trainable());
    ExchangedBytes {
        pushed: trained.map(bytes).sum::<u64>() + row_number_bytes(num_rows, num_servers),
        pulled: parameters.iter().map(bytes).sum(),
    }
}

/// The pieces of a step, if no worker is lost.
fn pieces(options: &WorkQueueOptions, step: u64) -> impl Iterator<Item = Piece> + use<> {
    let (total, size) = (
        options.microbatches_per_step,
        options.microbatches_per_piece.max(1),
    );
    (0..total.div_ceil(size)).map(move |number| Piece {
        step,
        first: number * size,
        num: size.min(total - number * size),
    })
}

//! What workers exchange with servers, by the closed form.
//!
//! Every piece is a pull of all parameters and a push of all gradients; of embedding tables, of the rows that it looks up.

use trainyard_nn::Parameter;
use trainyard_param_server::{Piece, Rows, WorkQueueOptions};

use super::Service;
use super::gradient_server::queue_options;
use super::piece_samples::PieceSamples;
use super::shards::lookup_tables;
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

/// The bytes of the first `num_steps` steps of servers, of which `trainer` is one, if no worker is lost.
pub fn exchanged_bytes(
    (run, service): (&TrainSpec, Service<'_>),
    num_steps: u64,
    trainer: &Trainer,
    num_servers: usize,
) -> Result<ExchangedBytes> {
    let num_microbatches = trainer.batching().num_global_microbatches();
    let options = queue_options(service, num_microbatches, num_steps);
    let tables = lookup_tables(service.run, trainer.model());
    let samples = PieceSamples::open(run, trainer.batching(), tch::Device::Cpu)?;
    let mut sum = ExchangedBytes::default();
    for piece in (0..num_steps).flat_map(|step| pieces(&options, step)) {
        let rows = if tables.is_empty() {
            Rows::default()
        } else {
            samples.rows(piece)?
        };
        let of_piece = exchanged_for_rows(trainer.parameters(), &tables, rows.len(), num_servers);
        sum.pushed += of_piece.pushed;
        sum.pulled += of_piece.pulled;
    }
    Ok(sum)
}

/// The bytes of a piece that looks up this many rows of every table.
pub(super) fn exchanged_for_rows(
    parameters: &[Parameter],
    tables: &[String],
    num_rows: usize,
    num_servers: usize,
) -> ExchangedBytes {
    let bytes = |parameter: &Parameter| {
        let (shape, element) = (parameter.shape(), parameter.kind().elt_size_in_bytes());
        let elements = match shape.split_first() {
            Some((&height, row)) if tables.iter().any(|table| table == parameter.name()) => {
                num_rows.min(height) * row.iter().product::<usize>()
            }
            _ => shape.iter().product(),
        };
        (elements * element) as u64
    };
    let trained = parameters
        .iter()
        .filter(|parameter| parameter.is_trainable());
    let numbers = num_servers * num_rows * size_of::<u32>();
    ExchangedBytes {
        pushed: trained.map(bytes).sum::<u64>() + numbers as u64,
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

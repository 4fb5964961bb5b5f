//! The bytes of parameters and gradients, as workers and servers exchange them.

use std::collections::HashSet;
use std::num::NonZero;
use std::ops::Range;

use tch::{Kind, Tensor};
use trainyard_config::Config;
use trainyard_mesh::slice_of;
use trainyard_nn::{Model, Parameter};
use trainyard_param_server::{JobInfo, ParamShard, Part, RowBlock, Table};
use trainyard_torch::{World, bytes};

use super::replica::FromServers;
use crate::error::{Result, TrainError};

/// The names of embedding tables of which a piece needs some rows only: lookups of the first unit that no other unit uses. A
/// worker that takes steps of its own needs all rows, because its optimizer may move them without a gradient.
pub(super) fn lookup_tables(run: &Config, model: &dyn Model) -> HashSet<String> {
    let units = model.units();
    let Some(first) = units.first().filter(|_| !run.has_local_updates()) else {
        return HashSet::new();
    };
    let tied: Vec<_> = units
        .iter()
        .flat_map(|unit| unit.tied_parameters())
        .collect();
    let is_tied = |table: &Parameter| tied.iter().any(|tied| tied.name() == table.name());
    let tables = first.lookup_tables().into_iter();
    let own = tables.filter(|table| !is_tied(table));
    own.map(|table| table.name().to_owned()).collect()
}

/// What this rank of the servers holds of every parameter.
pub(super) fn held_shards(
    parameters: &[Parameter],
    tables: &HashSet<String>,
    world: &World,
) -> Result<Vec<ParamShard>> {
    let shard = |parameter: &Parameter| {
        let shape = parameter.shape();
        let slice = slice_of(shape, &parameter.layout(), world.mesh(), world.rank())?;
        let within = slice.flat.clone();
        let within = within.unwrap_or(0..slice.region.num_elements());
        Ok(ParamShard {
            name: parameter.name().to_owned(),
            elements: slice.region.runs_within(shape, within).collect(),
            element_bytes: parameter.kind().elt_size_in_bytes(),
            is_trainable: parameter.is_trainable(),
            table: table_of(parameter).filter(|_| tables.contains(parameter.name())),
        })
    };
    parameters.iter().map(shard).collect()
}

/// The shape of a parameter as a table.
fn table_of(parameter: &Parameter) -> Option<Table> {
    let (&height, row) = parameter.shape().split_first()?;
    let width = NonZero::new(row.iter().product())?;
    Some(Table { height, width })
}

/// The rows of the highest table.
pub(super) fn max_rows(parameters: &[Parameter], tables: &HashSet<String>) -> usize {
    let tables = parameters.iter().filter(|p| tables.contains(p.name()));
    let heights = tables.filter_map(table_of).map(|table| table.height);
    heights.max().unwrap_or(0)
}

/// The bytes of a tensor, wherever it is.
pub(super) fn append_bytes(tensor: &Tensor, to: &mut Vec<u8>) -> Result<()> {
    let host = tensor
        .f_detach()?
        .f_to_device(tch::Device::Cpu)?
        .f_contiguous()?;
    let start = to.len();
    to.resize(start + host.numel() * host.kind().elt_size_in_bytes(), 0);
    bytes::copy_out(&host, 0, &mut to[start..]).map_err(failed)
}

/// Takes the bytes of `num` elements off the front, as a tensor on the host.
pub(super) fn take_elements(from: &mut &[u8], num: usize, kind: Kind) -> Result<Tensor> {
    let num_bytes = num * kind.elt_size_in_bytes();
    let (own, rest) = from.split_at_checked(num_bytes).ok_or_else(|| {
        TrainError::ParameterServer(format!(
            "{num} elements of {kind:?} are missing from a message"
        ))
    })?;
    *from = rest;
    Ok(Tensor::f_from_data_size(own, &[num as i64], kind)?)
}

/// Whole parameters, from what all servers have sent of them.
pub(super) struct WholeParameters<'a> {
    jobs: &'a [JobInfo],
    /// What is left of the bytes of every server.
    rest: Vec<&'a [u8]>,
    next: usize,
}

impl<'a> WholeParameters<'a> {
    pub(super) fn of(from: &FromServers<'a>) -> WholeParameters<'a> {
        WholeParameters {
            jobs: from.jobs,
            rest: from.bytes.iter().map(Vec::as_slice).collect(),
            next: 0,
        }
    }

    /// The bytes of the next parameter.
    pub(super) fn next(&mut self) -> Result<Vec<u8>> {
        let mut whole = Vec::new();
        for (job, rest) in self.jobs.iter().zip(&mut self.rest) {
            let shard = job.shards.get(self.next).ok_or_else(too_short)?;
            for elements in &shard.elements {
                let at = elements.start * shard.element_bytes..elements.end * shard.element_bytes;
                let (own, after) = rest.split_at_checked(at.len()).ok_or_else(too_short)?;
                *rest = after;
                whole.resize(whole.len().max(at.end), 0);
                whole[at].copy_from_slice(own);
            }
        }
        self.next += 1;
        Ok(whole)
    }
}

fn too_short() -> TrainError {
    TrainError::ParameterServer("a server has sent fewer parameters than it holds".to_owned())
}

/// The values of a part of a contiguous tensor: a flat view, or a copy of rows.
pub(super) fn values_of(tensor: &Tensor, part: &Part) -> Result<Tensor> {
    match part {
        Part::Elements(elements) => elements_of(tensor, elements),
        Part::Rows(block) => {
            let columns = columns_of(tensor, block)?;
            Ok(columns.f_index_select(0, &numbers(block, tensor.device())?)?)
        }
    }
}

/// Copies flat values into a part of a contiguous tensor.
pub(super) fn write_values(tensor: &Tensor, part: &Part, values: &Tensor) -> Result<()> {
    match part {
        Part::Elements(elements) => elements_of(tensor, elements)?.f_copy_(values)?,
        Part::Rows(block) => {
            let mut columns = columns_of(tensor, block)?;
            let values = values.f_to_device(tensor.device())?;
            let values = values.f_view([-1, block.columns.len() as i64])?;
            drop(columns.f_index_copy_(0, &numbers(block, tensor.device())?, &values)?);
        }
    }
    Ok(())
}

/// The columns of a block, of all rows.
fn columns_of(table: &Tensor, block: &RowBlock) -> Result<Tensor> {
    let rows = table.f_detach()?.f_view([-1, block.width as i64])?;
    let columns = &block.columns;
    Ok(rows.f_narrow(1, columns.start as i64, columns.len() as i64)?)
}

/// The numbers of the rows of a block.
fn numbers(block: &RowBlock, device: tch::Device) -> Result<Tensor> {
    let numbers: Vec<i64> = block.rows.iter().map(|&row| row.into()).collect();
    Ok(Tensor::f_from_slice(&numbers)?.f_to_device(device)?)
}

/// Some elements of a contiguous tensor, as a flat view.
pub(super) fn elements_of(tensor: &Tensor, elements: &Range<usize>) -> Result<Tensor> {
    let flat = tensor.f_detach()?.f_view(-1i64)?;
    Ok(flat.f_narrow(0, elements.start as i64, elements.len() as i64)?)
}

fn failed(error: std::io::Error) -> TrainError {
    TrainError::ParameterServer(error.to_string())
}

//! The staging buffer of a save: a copy of all shards that this rank writes, in host memory.
//!
//! Shards on a GPU are copied into pinned memory on a stream of their own. The host does not wait for these copies: the
//! device runs them before it goes on with training, and the thread that writes the files waits for them.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::path::Path;

use tch::{Device, Kind, Tensor};
use trainyard_checkpoint::{ElementSource, WriteItem};
use trainyard_nn::Parameter;
use trainyard_optim::Optimizer;
use trainyard_parallel::Strategy;
use trainyard_torch::device::{self, Event, Stream};
use trainyard_torch::{TorchError, bytes};

use super::save_plan::StateTensor;
use super::visit::Visit;
use crate::error::{Result, TrainError};

/// Memory that one save after the other uses.
pub(super) enum Buffer {
    /// For shards in host memory.
    Pageable(Vec<u8>),
    /// For shards on a GPU.
    Pinned(Tensor),
}

impl Buffer {
    pub(super) fn new(device: Device) -> Result<Buffer> {
        if device.is_cuda() {
            let empty = device::staging(&[0], Kind::Uint8, device)?;
            return Ok(Buffer::Pinned(empty));
        }
        Ok(Buffer::Pageable(Vec::new()))
    }

    /// Makes room for `num_bytes`.
    fn resize(&mut self, num_bytes: usize, device: Device) -> Result<()> {
        match self {
            Buffer::Pageable(memory) => memory.resize(num_bytes, 0),
            Buffer::Pinned(memory) if memory.numel() < num_bytes => {
                *memory = device::staging(&[num_bytes as i64], Kind::Uint8, device)?;
            }
            Buffer::Pinned(_) => {}
        }
        Ok(())
    }

    /// Copies a contiguous tensor to `range`; from a GPU, on the current stream.
    fn fill(&mut self, range: Range<usize>, tensor: &Tensor) -> Result<(), StagingError> {
        match self {
            Buffer::Pageable(memory) => Ok(bytes::copy_out(tensor, 0, &mut memory[range])?),
            Buffer::Pinned(memory) => {
                let target = memory.f_narrow(0, range.start as i64, range.len() as i64);
                let source = tensor.f_view(-1i64)?.f_view_dtype(Kind::Uint8)?;
                Ok(device::copy_non_blocking(&target?, &source)?)
            }
        }
    }
}

/// Why a shard could not be staged.
#[derive(Debug, thiserror::Error)]
enum StagingError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl From<tch::TchError> for StagingError {
    fn from(error: tch::TchError) -> StagingError {
        StagingError::Torch(error.into())
    }
}

/// The shards of one save, staged or being staged.
pub(super) struct Staged {
    pub(super) items: Vec<WriteItem>,
    ranges: Vec<Range<usize>>,
    pub(super) buffer: Buffer,
    copied: Event,
}

impl Staged {
    /// Starts to copy the shards to `buffer`; if they are offloaded, part by part.
    pub(super) fn new(
        mut buffer: Buffer,
        shards: &[StateTensor],
        device: Device,
        (model, optimizer): (&dyn Strategy, &dyn Optimizer),
    ) -> Result<Staged> {
        let mut end = 0;
        let range = |shard: &StateTensor| {
            let start = end;
            end += shard.item.num_bytes().unwrap_or(0) as usize;
            start..end
        };
        let ranges: Vec<Range<usize>> = shards.iter().map(range).collect();
        buffer.resize(end, device)?;
        let (compute, stream) = (Stream::current(device)?, Stream::from_pool(device)?);
        let mut visit = Visit::default();
        let visited = model.visit_states(Some(optimizer), &mut |part| {
            let names: HashSet<&str> = part.iter().map(Parameter::name).collect();
            let staged = shards.iter().zip(&ranges);
            let staged = staged.filter(|(shard, _)| names.contains(&*shard.parameter));
            visit.go_on(copy_part(staged, &mut buffer, &compute, &stream))
        });
        visit.end(visited)?;
        let copied = stream.record()?;
        // What training computes next may change the shards.
        compute.wait(&copied)?;
        Ok(Staged {
            items: shards.iter().map(|shard| shard.item.clone()).collect(),
            ranges,
            buffer,
            copied,
        })
    }

    pub(super) fn num_bytes(&self) -> u64 {
        self.ranges.last().map_or(0, |range| range.end) as u64
    }

    /// Blocks until the shards are copied.
    pub(super) fn wait(&self) -> Result<(), TorchError> {
        self.copied.wait_host()
    }
}

/// Copies shards that are in memory, after what `compute` has queued so far.
fn copy_part<'a>(
    mut shards: impl Iterator<Item = (&'a StateTensor, &'a Range<usize>)>,
    buffer: &mut Buffer,
    compute: &Stream,
    stream: &Stream,
) -> Result<()> {
    stream.wait(&compute.record()?)?;
    stream.scope(|| {
        shards.try_for_each(|(shard, range)| {
            let tensor = shard.tensor.f_detach()?.f_contiguous()?;
            stream.keep(&tensor)?;
            let filled = buffer.fill(range.clone(), &tensor);
            let path = Path::new(&shard.item.name);
            filled.map_err(|error| TrainError::io(path)(io::Error::other(error)))
        })
    })?
}

impl ElementSource for Staged {
    fn copy(&self, index: usize, start: usize, into: &mut [u8]) -> io::Result<()> {
        let start = self.ranges[index].start + start;
        match &self.buffer {
            Buffer::Pageable(memory) => into.copy_from_slice(&memory[start..start + into.len()]),
            Buffer::Pinned(memory) => bytes::copy_out(memory, start, into)?,
        }
        Ok(())
    }
}

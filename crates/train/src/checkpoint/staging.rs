//! The staging buffer of a save: a copy of all shards that this rank writes, in host memory.
//!
//! Shards on a GPU are copied into pinned memory on a stream of their own. The host does not wait for these copies: the
//! device runs them before it goes on with training, and the thread that writes the files waits for them.

use std::io;
use std::ops::Range;
use std::path::Path;

use tch::{Device, Kind, Tensor};
use trainyard_checkpoint::{ElementSource, WriteItem};
use trainyard_torch::device::{self, Event, Stream};
use trainyard_torch::{TorchError, bytes};

use super::save_plan::StateTensor;
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
    /// Starts to copy the shards to `buffer`.
    pub(super) fn new(
        mut buffer: Buffer,
        shards: &[StateTensor],
        device: Device,
    ) -> Result<Staged> {
        let mut end = 0;
        let range = |shard: &StateTensor| {
            let start = end;
            end += shard.item.num_bytes().unwrap_or(0) as usize;
            start..end
        };
        let ranges: Vec<Range<usize>> = shards.iter().map(range).collect();
        buffer.resize(end, device)?;
        // The copies see what has been queued so far.
        let (compute, stream) = (Stream::current(device)?, Stream::from_pool(device)?);
        stream.wait(&compute.record()?)?;
        stream.scope(|| -> Result<()> {
            for (shard, range) in shards.iter().zip(&ranges) {
                let tensor = shard.tensor.f_contiguous()?;
                stream.keep(&tensor)?;
                let filled = buffer.fill(range.clone(), &tensor);
                let path = Path::new(&shard.item.name);
                filled.map_err(|error| TrainError::io(path)(io::Error::other(error)))?;
            }
            Ok(())
        })??;
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

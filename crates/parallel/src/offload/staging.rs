//! Staging buffers: allocated once, each large enough for any record.

use std::ops::Deref;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};
use trainyard_torch::memory;
use trainyard_trace::MemoryKind;

use super::error::Result;
use super::pipeline::Pipeline;
use super::record::Record;

/// Allocates all buffers there will ever be.
pub(super) fn allocate(num_buffers: usize, num_bytes: usize) -> Result<Vec<Tensor>> {
    let empty = |_| Tensor::f_empty([num_bytes as i64], (Kind::Uint8, Device::Cpu));
    let buffers = memory::scope(MemoryKind::Communication, || {
        (0..num_buffers).map(empty).collect::<Result<_, _>>()
    });
    Ok(buffers?)
}

/// A record in memory: its parts as flat tensors, to be read and changed in place.
///
/// [`Spill::write_behind`](super::Spill::write_behind) writes it; dropped, the file keeps what it
/// had. Either way the memory is then used again, so no clone of a part may be kept that shares it.
#[must_use = "a record that is dropped is not written"]
pub struct Staged {
    pipeline: Arc<Pipeline>,
    record: usize,
    parts: Vec<Tensor>,
    /// `None` once it went on to be written.
    buffer: Option<Tensor>,
}

impl Staged {
    pub(super) fn new(pipeline: &Arc<Pipeline>, record: usize, buffer: Tensor) -> Result<Staged> {
        let parts = views(&pipeline.file.layout.records()[record], &buffer);
        // Made before an error is passed on, so that the buffer goes back.
        let mut staged = Staged {
            pipeline: Arc::clone(pipeline),
            record,
            parts: Vec::new(),
            buffer: Some(buffer),
        };
        staged.parts = parts?;
        Ok(staged)
    }

    /// Number of the record.
    pub fn record(&self) -> usize {
        self.record
    }

    pub(super) fn is_of(&self, pipeline: &Arc<Pipeline>) -> bool {
        Arc::ptr_eq(&self.pipeline, pipeline)
    }

    pub(super) fn write(mut self) -> Result<()> {
        let buffer = self.buffer.take();
        buffer.map_or(Ok(()), |buffer| self.pipeline.put(self.record, buffer))
    }
}

impl Deref for Staged {
    type Target = [Tensor];

    fn deref(&self) -> &[Tensor] {
        &self.parts
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pipeline.give_back(self.record, buffer);
        }
    }
}

/// The parts of a record as tensors on the memory of `buffer`.
fn views(record: &Record, buffer: &Tensor) -> Result<Vec<Tensor>> {
    let view = |(start, part): (usize, super::Part)| {
        let bytes = buffer.f_narrow(0, start as i64, part.num_bytes() as i64)?;
        bytes.f_view_dtype(part.kind)
    };
    Ok(record.starts().map(view).collect::<Result<_, _>>()?)
}

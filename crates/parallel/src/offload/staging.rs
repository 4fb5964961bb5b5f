//! Staging buffers: allocated once, each large enough for any record.

use std::ops::Deref;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};
use trainyard_torch::{device, memory};
use trainyard_trace::MemoryKind;

use super::error::Result;
use super::pipeline::Pipeline;
use super::record::Record;

/// Allocates all staging buffers, from which `device` copies.
pub(super) fn allocate(
    num_buffers: usize,
    num_bytes: usize,
    device: Device,
) -> Result<Vec<Tensor>> {
    let empty = |_| device::staging(&[num_bytes as i64], Kind::Uint8, device);
    let buffers = memory::scope(MemoryKind::Communication, || {
        (0..num_buffers).map(empty).collect::<Result<_, _>>()
    });
    Ok(buffers?)
}

/// A record in a staging buffer: its flat tensors, which can be read and updated in place.
///
/// [`Spill::write_behind`](super::Spill::write_behind) writes it; if it is dropped, the file keeps the previous data.
/// In both cases the buffer is reused, so clones of its tensors must not be kept.
#[must_use = "a record that is dropped is not written"]
pub struct Staged {
    pipeline: Arc<Pipeline>,
    record: usize,
    tensors: Vec<Tensor>,
    /// `None` after it was queued for writing.
    buffer: Option<Tensor>,
}

impl Staged {
    pub(super) fn new(pipeline: &Arc<Pipeline>, record: usize, buffer: Tensor) -> Result<Staged> {
        let tensors = views(&pipeline.file.layout.records()[record], &buffer);
        // Created before an error is returned, so that its drop releases the buffer.
        let mut staged = Staged {
            pipeline: Arc::clone(pipeline),
            record,
            tensors: Vec::new(),
            buffer: Some(buffer),
        };
        staged.tensors = tensors?;
        Ok(staged)
    }

    /// Index of the record.
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
        &self.tensors
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pipeline.release(self.record, buffer);
        }
    }
}

/// The tensors of a record as views of `buffer`.
fn views(record: &Record, buffer: &Tensor) -> Result<Vec<Tensor>> {
    let view = |(start, spec): (usize, super::TensorSpec)| {
        let bytes = buffer.f_narrow(0, start as i64, spec.num_bytes() as i64)?;
        bytes.f_view_dtype(spec.kind)
    };
    Ok(record.starts().map(view).collect::<Result<_, _>>()?)
}

//! A pool of buffers that units use in turn.
//!
//! A unit's flat parameter needs memory only while it is gathered or its gradients are being reduced. Every buffer
//! of the pool fits the longest flat parameter, so any buffer serves any unit, and after the first step nothing is
//! allocated any more, unless the pool is emptied because it is not needed for a while.

use tch::Tensor;
use trainyard_torch::{Result, TorchError, memory, meta, storage};
use trainyard_trace::MemoryKind;

use crate::flat::zeros_flat;

/// Buffers of one type.
pub(super) struct Pool {
    /// A tensor with the type and device of the buffers.
    like: Tensor,
    length: usize,
    /// Tensors with an unused buffer.
    free: Vec<Tensor>,
    /// Tensors whose buffer is in use.
    used: Vec<Tensor>,
}

impl Pool {
    /// A pool for flat tensors of up to `length` elements of the type of `like`.
    pub(super) fn new(like: &Tensor, length: usize) -> Pool {
        Pool {
            like: like.shallow_clone(),
            length,
            free: Vec::new(),
            used: Vec::new(),
        }
    }

    /// Gives `flat`, which has no storage, a buffer with undefined contents.
    pub(super) fn acquire(&mut self, flat: &Tensor) -> Result<()> {
        let buffer = match self.free.pop().filter(|_| !self.is_meta()) {
            Some(buffer) => buffer,
            None => self.buffer(MemoryKind::Communication)?,
        };
        storage::swap(&buffer, flat)?;
        self.used.push(buffer);
        Ok(())
    }

    /// Takes the buffer of `flat` back into the pool.
    pub(super) fn release(&mut self, flat: &Tensor) -> Result<()> {
        let Some(empty) = self.used.pop() else {
            return Err(TorchError::Invalid(
                "a buffer was released that was not acquired from the pool".to_owned(),
            ));
        };
        storage::swap(&empty, flat)?;
        let idle = if self.is_meta() {
            drop(empty);
            self.buffer(MemoryKind::Other)?
        } else {
            empty
        };
        self.free.push(idle);
        Ok(())
    }

    /// Releases the memory of unused buffers.
    pub(super) fn empty(&mut self) {
        self.free.clear();
    }

    /// Whether this is a dry run. There buffers cost nothing, so unused ones are recreated under another memory
    /// kind: the timeline then shows releases, and the total still shows the memory that the pool reserves.
    fn is_meta(&self) -> bool {
        meta::is_meta(&self.like)
    }

    fn buffer(&self, kind: MemoryKind) -> Result<Tensor> {
        let dtype = self.like.kind();
        memory::scope(kind, || {
            if self.is_meta() {
                // Recreating a buffer must not look like work.
                meta::empty(&[self.length as i64], dtype)
            } else {
                zeros_flat(&self.like, self.length, dtype)
            }
        })
    }
}

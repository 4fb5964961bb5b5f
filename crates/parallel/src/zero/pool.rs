//! Memory that units use in turn.
//!
//! A unit's flat parameter needs memory only while it is gathered or its gradients are being reduced. On GPUs, the memory
//! then goes back to the caching allocator, which can give it to activations and logits. On CPU, new memory costs page
//! faults, so that unused buffers stay in the pool. Every buffer fits the longest flat parameter, so any buffer serves
//! any unit, and after the first step nothing is allocated any more, unless the pool is emptied because it is not needed
//! for a while.

use tch::Tensor;
use trainyard_torch::{Result, TorchError, memory, storage};
use trainyard_trace::MemoryKind;

use crate::flat::zeros_flat;

/// The memory of tensors of one type.
pub(super) struct Pool {
    /// A tensor with the type and device of the buffers.
    like: Tensor,
    length: usize,
    keeps_unused: bool,
    /// Tensors with an unused buffer.
    free: Vec<Tensor>,
    /// Tensors whose buffer is in use.
    used: Vec<Tensor>,
}

impl Pool {
    /// A pool for flat tensors of up to `length` elements of the type of `like`. Unless it keeps unused buffers, the
    /// allocator gets them back.
    pub(super) fn new(like: &Tensor, length: usize, keeps_unused: bool) -> Pool {
        Pool {
            like: like.shallow_clone(),
            length,
            keeps_unused,
            free: Vec::new(),
            used: Vec::new(),
        }
    }

    /// Gives `flat`, which has no storage, memory with undefined contents.
    pub(super) fn acquire(&mut self, flat: &Tensor) -> Result<()> {
        if !self.keeps_unused {
            return memory::scope(MemoryKind::Communication, || storage::restore(flat));
        }
        let buffer = match self.free.pop() {
            Some(buffer) => buffer,
            None => self.buffer()?,
        };
        storage::swap(&buffer, flat)?;
        self.used.push(buffer);
        Ok(())
    }

    /// Takes the memory of `flat` back. Collectives that use it must have ended, or the device must wait for them.
    pub(super) fn release(&mut self, flat: &Tensor) -> Result<()> {
        if !self.keeps_unused {
            return storage::release(flat);
        }
        let Some(empty) = self.used.pop() else {
            return Err(TorchError::Invalid(
                "a buffer was released that was not acquired from the pool".to_owned(),
            ));
        };
        storage::swap(&empty, flat)?;
        self.free.push(empty);
        Ok(())
    }

    /// Releases the memory of unused buffers.
    pub(super) fn empty(&mut self) {
        self.free.clear();
    }

    fn buffer(&self) -> Result<Tensor> {
        memory::scope(MemoryKind::Communication, || {
            zeros_flat(&self.like, self.length, self.like.kind())
        })
    }
}

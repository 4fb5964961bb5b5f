//! Memory that units take turns with.
//!
//! A unit's row needs memory only while it is gathered or its gradients are on their way. Every
//! buffer of the pool fits the longest row, so any buffer serves any unit, and after the first step
//! nothing is allocated any more, unless the pool is emptied because it is not needed for long.

use tch::Tensor;
use trainyard_torch::{Result, TorchError, memory, meta, storage};
use trainyard_trace::MemoryKind;

use super::blank::blank;

/// Buffers of one type, lent and given back.
pub(super) struct Pool {
    /// Tells type and device.
    like: Tensor,
    length: usize,
    /// Tensors that hold a buffer nobody uses.
    free: Vec<Tensor>,
    /// Tensors whose buffer is lent.
    lent: Vec<Tensor>,
}

impl Pool {
    /// A pool for rows of up to `length` elements of the type of `like`.
    pub(super) fn new(like: &Tensor, length: usize) -> Pool {
        Pool {
            like: like.shallow_clone(),
            length,
            free: Vec::new(),
            lent: Vec::new(),
        }
    }

    /// Puts a buffer behind `row`, which has none; its contents are undefined.
    pub(super) fn lend(&mut self, row: &Tensor) -> Result<()> {
        let buffer = match self.free.pop().filter(|_| !self.is_dry()) {
            Some(buffer) => buffer,
            None => self.buffer(MemoryKind::Communication)?,
        };
        storage::exchange(&buffer, row)?;
        self.lent.push(buffer);
        Ok(())
    }

    /// Takes the buffer behind `row` back.
    pub(super) fn take_back(&mut self, row: &Tensor) -> Result<()> {
        let Some(shell) = self.lent.pop() else {
            return Err(TorchError::Invalid(
                "a buffer was given back that was never lent".to_owned(),
            ));
        };
        storage::exchange(&shell, row)?;
        let idle = match self.is_dry() {
            true => {
                drop(shell);
                self.buffer(MemoryKind::Other)?
            }
            false => shell,
        };
        self.free.push(idle);
        Ok(())
    }

    /// Gives the memory of buffers that nobody uses back.
    pub(super) fn empty(&mut self) {
        self.free.clear();
    }

    /// In a dry run buffers cost nothing, so those that nobody uses are made anew under another kind:
    /// its timeline shows what is released, and its total what is held.
    fn is_dry(&self) -> bool {
        meta::is_meta(&self.like)
    }

    fn buffer(&self, kind: MemoryKind) -> Result<Tensor> {
        memory::scope(kind, || blank(&self.like, self.length, self.like.kind()))
    }
}

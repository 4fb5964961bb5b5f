//! States that live in files: what a unit's parameters and their optimiser states are while nobody
//! computes with them.
//!
//! A tensor that is put on the shelf keeps its shape and its place in the optimiser; only its memory
//! goes. Taken off, it stands on a staging buffer, is changed there, and is written behind.

use std::path::{Path, PathBuf};

use tch::Tensor;
use trainyard_torch::storage;

use crate::error::Result;
use crate::offload::{Counters, Record, Spill, Staged};

/// Where states are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffloadOptions {
    /// A folder on a disk that is fast, or in memory.
    pub folder: PathBuf,
    /// This rank, whose files are its own.
    pub rank: usize,
    /// Staging buffers of each file: three let one be read and one be written while one is used.
    pub num_buffers: usize,
}

/// One kind of state of all units, a record for each.
pub(super) struct Shelf(Spill);

impl Shelf {
    /// A file for rows of these lengths and this kind.
    pub(super) fn new(options: &OffloadOptions, name: &str, records: Vec<Record>) -> Result<Shelf> {
        let folder: &Path = &options.folder.join(name);
        Ok(Shelf(Spill::create(
            folder,
            options.rank,
            records,
            options.num_buffers,
        )?))
    }

    /// A file with one tensor of every unit, whose memory it takes; `None` where a unit has none.
    pub(super) fn filled(
        options: &OffloadOptions,
        name: &str,
        tensors: &[Option<Tensor>],
    ) -> Result<Shelf> {
        let record = |tensor: &Option<Tensor>| match tensor {
            Some(tensor) => Record::of(tensor.kind(), [tensor.numel()]),
            None => Record::default(),
        };
        let mut shelf = Shelf::new(options, name, tensors.iter().map(record).collect())?;
        for (index, tensor) in tensors.iter().enumerate() {
            if let Some(tensor) = tensor {
                shelf.put(index, std::slice::from_ref(tensor))?;
            }
        }
        Ok(shelf)
    }

    /// Writes `tensors`, and takes their memory.
    pub(super) fn put(&mut self, record: usize, tensors: &[Tensor]) -> Result<()> {
        let staged = self.0.take(record)?;
        for (part, tensor) in staged.iter().zip(tensors) {
            tch::no_grad(|| part.shallow_clone().f_copy_(&tensor.f_view(-1i64)?))?;
            storage::release(tensor)?;
        }
        Ok(self.0.write_behind(staged)?)
    }

    pub(super) fn read_ahead(&mut self, record: usize) -> Result<()> {
        self.0.read_ahead(record)?;
        Ok(())
    }

    pub(super) fn take(&mut self, record: usize) -> Result<Staged> {
        Ok(self.0.take(record)?)
    }

    pub(super) fn write_behind(&mut self, staged: Staged) -> Result<()> {
        Ok(self.0.write_behind(staged)?)
    }

    pub(super) fn counters(&self) -> Counters {
        self.0.counters()
    }
}

/// A tensor off the shelf for a while: it stands on `data` until this is dropped or put back.
pub(super) struct Borrowed {
    tensor: Tensor,
    absent: Tensor,
}

impl Borrowed {
    /// Makes `tensor`, whose memory was taken, stand on `data`.
    pub(super) fn new(tensor: &Tensor, data: &Tensor) -> Result<Borrowed> {
        let absent = tensor.f_detach()?;
        storage::rebind(tensor, &data.f_view(&tensor.size()[..])?)?;
        Ok(Borrowed {
            tensor: tensor.shallow_clone(),
            absent,
        })
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        // It can fail only where it could not have been made.
        let _ = storage::rebind(&self.tensor, &self.absent);
    }
}

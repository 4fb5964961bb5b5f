//! Offload of parameters and optimizer states to files while no unit computes with them.
//!
//! An offloaded tensor keeps its shape and its identity in the optimizer, but has no storage. To be used, it is
//! swapped in: bound to a staging buffer, updated there, and written back in the background.

use std::path::{Path, PathBuf};

use tch::Tensor;
use trainyard_torch::storage;

use crate::error::Result;
use crate::offload::{Counters, Record, Spill, Staged};

/// Where states are offloaded to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffloadOptions {
    /// A directory on a fast disk, or in memory.
    pub folder: PathBuf,
    /// This rank, which names its files.
    pub rank: usize,
    /// Staging buffers per file: three allow one to be read and one to be written while one is in use.
    pub num_buffers: usize,
}

/// A file with one kind of state of all units, one record per unit.
pub(super) struct OffloadFile(Spill);

impl OffloadFile {
    /// Creates a file with the given records.
    pub(super) fn new(
        options: &OffloadOptions,
        name: &str,
        records: Vec<Record>,
    ) -> Result<OffloadFile> {
        let folder: &Path = &options.folder.join(name);
        Ok(OffloadFile(Spill::create(
            folder,
            options.rank,
            records,
            options.num_buffers,
        )?))
    }

    /// Creates a file with one tensor per unit and releases the tensors' storage; `None` if a unit has no tensor.
    pub(super) fn filled(
        options: &OffloadOptions,
        name: &str,
        tensors: &[Option<Tensor>],
    ) -> Result<OffloadFile> {
        let record = |tensor: &Option<Tensor>| match tensor {
            Some(tensor) => Record::of(tensor.kind(), [tensor.numel()]),
            None => Record::default(),
        };
        let mut file = OffloadFile::new(options, name, tensors.iter().map(record).collect())?;
        for (index, tensor) in tensors.iter().enumerate() {
            if let Some(tensor) = tensor {
                file.put(index, std::slice::from_ref(tensor))?;
            }
        }
        Ok(file)
    }

    /// Writes `tensors` to a record and releases their storage.
    pub(super) fn put(&mut self, record: usize, tensors: &[Tensor]) -> Result<()> {
        let staged = self.0.take(record)?;
        for (buffer, tensor) in staged.iter().zip(tensors) {
            tch::no_grad(|| buffer.shallow_clone().f_copy_(&tensor.f_view(-1i64)?))?;
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

/// An offloaded tensor that is bound to a staging buffer until this guard is dropped.
pub(super) struct SwappedIn {
    tensor: Tensor,
    without_storage: Tensor,
}

impl SwappedIn {
    /// Binds `tensor`, which has no storage, to `data`.
    pub(super) fn new(tensor: &Tensor, data: &Tensor) -> Result<SwappedIn> {
        let without_storage = tensor.f_detach()?;
        storage::rebind(tensor, &data.f_view(&tensor.size()[..])?)?;
        Ok(SwappedIn {
            tensor: tensor.shallow_clone(),
            without_storage,
        })
    }
}

impl Drop for SwappedIn {
    fn drop(&mut self) {
        // Rebinding can only fail if it already failed in `new`.
        let _ = storage::rebind(&self.tensor, &self.without_storage);
    }
}

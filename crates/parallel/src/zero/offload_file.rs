//! Offload of parameters and optimizer states to files while no unit computes with them.
//!
//! An offloaded tensor keeps its shape and its identity in the optimizer, but has no storage. To be used, it is
//! swapped in: bound to a staging buffer, updated there, and written back in the background. On a GPU it is bound to
//! device memory, to and from which a stream of the file copies the staging buffer.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::{Device, Tensor};
use trainyard_cost::Stage;
use trainyard_torch::device::{self, Event, Stream};
use trainyard_torch::{memory, meta, storage};
use trainyard_trace::MemoryKind;

use crate::error::Result;
use crate::offload::{Counters, Record, Spill, Staged};

/// Which states are offloaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OffloadStates {
    /// Parameters, master weights and moments. Parameters must be sharded (stage 3).
    #[default]
    All,
    /// Master weights and moments.
    Optimizer,
}

/// Which states are offloaded, and where to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffloadOptions {
    /// Which states are offloaded.
    pub states: OffloadStates,
    /// A directory on a fast disk, or in memory.
    pub folder: PathBuf,
    /// This rank, which names its files.
    pub rank: usize,
    /// The device of the states while they are in use.
    pub device: Device,
    /// Staging buffers per file: three allow one to be read and one to be written while one is in use.
    pub num_buffers: usize,
}

impl OffloadOptions {
    /// The same for a group of parameters: with a folder that no other parameters of this process use, because a rank may
    /// hold several stages of a pipeline, and experts beside the rest. Parameters that are not sharded stay in memory.
    pub(super) fn for_group(&self, stage: Stage) -> OffloadOptions {
        static NUM_FOLDERS: AtomicUsize = AtomicUsize::new(0);
        let number = NUM_FOLDERS.fetch_add(1, Ordering::Relaxed);
        OffloadOptions {
            states: match stage {
                Stage::Parameters => self.states,
                Stage::OptimizerStates | Stage::Gradients => OffloadStates::Optimizer,
            },
            folder: self.folder.join(number.to_string()),
            ..self.clone()
        }
    }
}

/// A file with one kind of state of all units, one record per unit.
pub(super) struct OffloadFile {
    /// `None` in a dry run, which writes no files.
    spill: Option<Spill>,
    records: Vec<Record>,
    device: Device,
    /// Copies between host and device.
    stream: Stream,
    /// A record that is being copied from the device, to be written when it has arrived.
    arriving: Option<(Staged, Event)>,
}

impl OffloadFile {
    /// Creates a file with the given records. If the tensors are meta tensors, nothing is ever written.
    pub(super) fn new(
        options: &OffloadOptions,
        name: &str,
        records: Vec<Record>,
        is_meta: bool,
    ) -> Result<OffloadFile> {
        let folder: &Path = &options.folder.join(name);
        let (device, num_buffers) = (options.device, options.num_buffers);
        let create =
            || Spill::create_for(device, folder, options.rank, records.clone(), num_buffers);
        Ok(OffloadFile {
            spill: (!is_meta).then(create).transpose()?,
            records,
            device,
            stream: Stream::from_pool(device)?,
            arriving: None,
        })
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
        let is_meta = tensors.iter().flatten().any(meta::is_meta);
        let records = tensors.iter().map(record).collect();
        let mut file = OffloadFile::new(options, name, records, is_meta)?;
        for (index, tensor) in tensors.iter().enumerate() {
            if let Some(tensor) = tensor {
                file.put(index, std::slice::from_ref(tensor))?;
            }
        }
        Ok(file)
    }

    /// Writes `tensors` to a record and releases their storage.
    pub(super) fn put(&mut self, record: usize, tensors: &[Tensor]) -> Result<()> {
        self.write_arriving()?;
        if let Some(spill) = &mut self.spill {
            let staged = spill.take(record)?;
            debug_assert_eq!(staged.len(), tensors.len());
            for (buffer, tensor) in staged.iter().zip(tensors) {
                tch::no_grad(|| buffer.shallow_clone().f_copy_(&tensor.f_view(-1i64)?))?;
            }
            spill.write_behind(staged)?;
        }
        Ok(tensors.iter().try_for_each(storage::release)?)
    }

    pub(super) fn read_ahead(&mut self, record: usize) -> Result<()> {
        let arriving = self.arriving.as_ref();
        if arriving.is_some_and(|(staged, _)| staged.record() == record) {
            self.write_arriving()?;
        }
        if let Some(spill) = &mut self.spill {
            spill.read_ahead(record)?;
        }
        Ok(())
    }

    /// Waits for a record and starts to copy it to the device.
    pub(super) fn take(&mut self, record: usize) -> Result<Loaded> {
        self.write_arriving()?;
        let Some(spill) = &mut self.spill else {
            return self.take_dry(record);
        };
        let staged = spill.take(record)?;
        let compute = Stream::current(self.device)?;
        let tensors = staged.iter().map(|host| self.device_tensor(host));
        let tensors: Vec<Tensor> = tensors.collect::<Result<_>>()?;
        self.copy(&compute, &tensors, &staged)?;
        let copied = self.stream.record()?;
        compute.wait(&copied)?;
        Ok(Loaded {
            staged: Some(staged),
            tensors,
            copied,
        })
    }

    /// A record of a dry run.
    fn take_dry(&self, record: usize) -> Result<Loaded> {
        let specs = self.records[record].tensors.iter();
        let tensors = specs.map(|spec| {
            let shape = [spec.num_elements as i64];
            memory::scope(MemoryKind::Optimizer, || meta::empty(&shape, spec.kind))
        });
        Ok(Loaded {
            staged: None,
            tensors: tensors.collect::<Result<_, _>>()?,
            copied: self.stream.record()?,
        })
    }

    /// Copies a record back from the device, and writes it in the background.
    pub(super) fn write_behind(&mut self, mut loaded: Loaded) -> Result<()> {
        let (Some(staged), Some(spill)) = (loaded.staged.take(), &mut self.spill) else {
            return Ok(());
        };
        if !self.device.is_cuda() {
            return Ok(spill.write_behind(staged)?);
        }
        self.write_arriving()?;
        self.copy(&Stream::current(self.device)?, &staged, &loaded.tensors)?;
        self.arriving = Some((staged, self.stream.record()?));
        Ok(())
    }

    /// Waits for the record that is being copied from the device, and writes it.
    fn write_arriving(&mut self) -> Result<()> {
        match (self.arriving.take(), &mut self.spill) {
            (Some((staged, arrived)), Some(spill)) => {
                arrived.wait_host()?;
                Ok(spill.write_behind(staged)?)
            }
            _ => Ok(()),
        }
    }

    /// A tensor on the device for a tensor in a staging buffer; on CPU it is that tensor.
    fn device_tensor(&self, host: &Tensor) -> Result<Tensor> {
        if !self.device.is_cuda() {
            return Ok(host.shallow_clone());
        }
        Ok(Tensor::f_empty(host.size(), (host.kind(), self.device))?)
    }

    /// Copies tensors on the stream of this file, after what `compute` has queued so far.
    fn copy(&self, compute: &Stream, targets: &[Tensor], sources: &[Tensor]) -> Result<()> {
        if !self.device.is_cuda() {
            return Ok(());
        }
        self.stream.wait(&compute.record()?)?;
        for (target, source) in targets.iter().zip(sources) {
            self.stream
                .scope(|| device::copy_non_blocking(target, source))??;
            for tensor in [target, source] {
                self.stream.keep(tensor)?;
            }
        }
        Ok(())
    }

    pub(super) fn counters(&self) -> Option<Counters> {
        self.spill.as_ref().map(Spill::counters)
    }
}

impl Drop for OffloadFile {
    fn drop(&mut self) {
        if let Err(error) = self.write_arriving() {
            tracing::error!("cannot write an offloaded record: {error}");
        }
    }
}

/// A record on the device: its flat tensors, which can be read and updated in place.
pub(super) struct Loaded {
    /// `None` after it was queued for writing, and in a dry run.
    staged: Option<Staged>,
    tensors: Vec<Tensor>,
    copied: Event,
}

impl Deref for Loaded {
    type Target = [Tensor];

    fn deref(&self) -> &[Tensor] {
        &self.tensors
    }
}

impl Drop for Loaded {
    /// The staging buffer is reused, so the copy from it must be over.
    fn drop(&mut self) {
        if self.staged.is_some()
            && let Err(error) = self.copied.wait_host()
        {
            tracing::error!("cannot wait for an offloaded record: {error}");
        }
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

//! The interface of an offload file: read ahead, take, write behind.

use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use tch::Device;

use super::counters::Counters;
use super::error::{OffloadError, Result};
use super::file::SpillFile;
use super::pipeline::Pipeline;
use super::record::{Layout, Record};
use super::staging::{Staged, allocate};

/// Records in one file, accessed through a few staging buffers.
///
/// One thread reads and one writes. Dropping the value stops both and removes the file.
pub struct Spill {
    pipeline: Arc<Pipeline>,
    threads: Vec<JoinHandle<()>>,
}

impl Spill {
    /// Creates the file `rank-<rank>.spill` in `folder` with space for all records, which read as zeros until they
    /// are written, and `num_buffers` buffers of the size of the largest record. Two buffers allow one record to be
    /// used while another is moved, three allow one to be read and one to be written meanwhile.
    pub fn create(
        folder: &Path,
        rank: usize,
        records: Vec<Record>,
        num_buffers: usize,
    ) -> Result<Spill> {
        Spill::create_for(Device::Cpu, folder, rank, records, num_buffers)
    }

    /// The same with staging buffers from which `device` copies.
    pub fn create_for(
        device: Device,
        folder: &Path,
        rank: usize,
        records: Vec<Record>,
        num_buffers: usize,
    ) -> Result<Spill> {
        if num_buffers == 0 {
            return Err(OffloadError::NoBuffer { num_buffers });
        }
        let file = SpillFile::create(folder, rank, Layout::new(records))?;
        let buffers = allocate(num_buffers, file.layout.largest(), device)?;
        let mut spill = Spill {
            pipeline: Arc::new(Pipeline::new(file, buffers)),
            threads: Vec::new(),
        };
        spill.start("offload read", Pipeline::read_until_closed)?;
        spill.start("offload write", Pipeline::write_until_closed)?;
        Ok(spill)
    }

    fn start(&mut self, name: &str, run: fn(&Pipeline)) -> Result<()> {
        let pipeline = Arc::clone(&self.pipeline);
        let thread = thread::Builder::new().name(name.to_owned());
        let started = thread.spawn(move || run(&pipeline));
        self.threads
            .push(started.map_err(|source| OffloadError::Create {
                path: self.path().to_owned(),
                source,
            })?);
        Ok(())
    }

    /// Starts to read a record before it is needed, without waiting. Returns `false` if no buffer is free: the
    /// record is then read when it is taken.
    pub fn read_ahead(&mut self, record: usize) -> Result<bool> {
        self.check(record)?;
        self.pipeline.prefetch(record)
    }

    /// Waits for a record and returns it. If it was not read ahead and no buffer is free, it waits for a write to
    /// free one, or evicts the record that was read ahead last.
    pub fn take(&mut self, record: usize) -> Result<Staged> {
        self.check(record)?;
        let buffer = self.pipeline.claim(record)?;
        Staged::new(&self.pipeline, record, buffer)
    }

    /// Queues the write of a record, without waiting. A later read returns the written data. If a write fails, the
    /// next call of any method reports it: an error of this call belongs to an earlier write, and this write is
    /// queued nevertheless.
    pub fn write_behind(&mut self, staged: Staged) -> Result<()> {
        if !staged.is_of(&self.pipeline) {
            return Err(OffloadError::WrongFile {
                path: self.path().to_owned(),
                record: staged.record(),
            });
        }
        staged.write()
    }

    /// Waits until all queued writes are done. Each call reports at most one failed write.
    pub fn flush(&mut self) -> Result<()> {
        self.pipeline.flush()
    }

    /// The I/O counters so far.
    pub fn counters(&self) -> Counters {
        self.pipeline.counters()
    }

    /// The fraction of I/O time that overlapped computation; see [`Counters::overlap`].
    pub fn overlap(&self) -> f64 {
        self.counters().overlap()
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        self.pipeline.file.path()
    }

    fn check(&self, record: usize) -> Result<()> {
        let num_records = self.pipeline.file.layout.records().len();
        if record >= num_records {
            return Err(OffloadError::NoSuchRecord {
                record,
                num_records,
            });
        }
        Ok(())
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        self.pipeline.close();
        for thread in self.threads.drain(..) {
            // A thread that panicked has no work left to finish.
            let _ = thread.join();
        }
    }
}

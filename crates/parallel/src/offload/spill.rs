//! The caller's side: records asked for, taken, and written behind.

use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use super::counters::Counters;
use super::error::{OffloadError, Result};
use super::file::SpillFile;
use super::pipeline::Pipeline;
use super::record::{Layout, Record};
use super::staging::{Staged, allocate};

/// Records kept in one file, and a few buffers through which they come and go.
///
/// One thread reads and one writes; both end with the value, and the file with them.
pub struct Spill {
    pipeline: Arc<Pipeline>,
    threads: Vec<JoinHandle<()>>,
}

impl Spill {
    /// Makes the file `rank-<rank>.spill` in `folder` with room for all records, which read as zeros
    /// until they are written, and `num_buffers` buffers of the size of the largest. Two let one
    /// record be used while another is moved, three let one be read and one be written meanwhile.
    pub fn create(
        folder: &Path,
        rank: usize,
        records: Vec<Record>,
        num_buffers: usize,
    ) -> Result<Spill> {
        if num_buffers == 0 {
            return Err(OffloadError::NoBuffer { num_buffers });
        }
        let file = SpillFile::create(folder, rank, Layout::new(records))?;
        let buffers = allocate(num_buffers, file.layout.largest())?;
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

    /// Asks for a record before it is needed, and does not wait. `false` means that no buffer is
    /// free: the record will be read when it is taken.
    pub fn read_ahead(&mut self, record: usize) -> Result<bool> {
        self.check(record)?;
        self.pipeline.ask(record)
    }

    /// Waits for a record and hands it out. If it was not asked for and no buffer is free, it waits
    /// for a write to give one back; without a write it takes the one of what was asked for last.
    pub fn take(&mut self, record: usize) -> Result<Staged> {
        self.check(record)?;
        let buffer = self.pipeline.claim(record)?;
        Staged::new(&self.pipeline, record, buffer)
    }

    /// Queues a record to be written, and does not wait. Reading it again gives what was written.
    /// A write that fails is told by the next call, whichever that is: an error from here is of an
    /// earlier write, and this one is queued all the same.
    pub fn write_behind(&mut self, staged: Staged) -> Result<()> {
        if !staged.is_of(&self.pipeline) {
            return Err(OffloadError::Foreign {
                path: self.path().to_owned(),
                record: staged.record(),
            });
        }
        staged.write()
    }

    /// Waits until everything queued is written; several failures take as many calls to tell.
    pub fn flush(&mut self) -> Result<()> {
        self.pipeline.flush()
    }

    /// What was moved so far, and at what cost.
    pub fn counters(&self) -> Counters {
        self.pipeline.counters()
    }

    /// The share of the moving that nobody waited for; see [`Counters::overlap`].
    pub fn overlap(&self) -> f64 {
        self.counters().overlap()
    }

    /// The file.
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
            // A thread that panicked has nothing left to finish.
            let _ = thread.join();
        }
    }
}

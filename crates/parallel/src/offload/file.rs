//! One rank's file: made with all its room at once, removed at the end.
//!
//! It is scratch: nothing reads it after the process that wrote it, so nothing is synced, and the
//! checksums of what was written stay in memory. That catches what a checksum beside the data
//! would not: a write that never reached the file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock, fstatvfs};
use rustix::io::{Errno, retry_on_intr};
use tch::Tensor;
use trainyard_torch::bytes;

use super::error::{OffloadError, Operation, Result, Tear};
use super::record::Layout;

/// What the file holds of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// Nothing yet, which reads as zeros.
    Zeros,
    /// Bytes with this checksum.
    Written(u32),
    /// Part of a write that failed.
    Lost,
}

/// The file and where its records lie.
pub(super) struct SpillFile {
    file: File,
    path: PathBuf,
    pub layout: Layout,
}

impl SpillFile {
    /// Makes the folder and the file; what an earlier process left there is overwritten.
    pub(super) fn create(folder: &Path, rank: usize, layout: Layout) -> Result<SpillFile> {
        let path = folder.join(format!("rank-{rank}.spill"));
        let opened = fs::create_dir_all(folder).and_then(|()| {
            // Not truncated before it is known to be ours.
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            options.open(&path)
        });
        let file = match opened.and_then(|file| lock(&file).map(|is_ours| (file, is_ours))) {
            Ok((file, true)) => file,
            Ok((_, false)) => return Err(OffloadError::InUse { path }),
            Err(source) => return Err(OffloadError::Create { path, source }),
        };
        // From here on an error removes the file.
        let spill = SpillFile { file, path, layout };
        spill.allocate().map_err(|e| spill.not_created(e))?;
        Ok(spill)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the room now, so that a full disk is known before training begins.
    fn allocate(&self) -> io::Result<()> {
        let num_bytes = self.layout.num_bytes;
        self.file.set_len(0)?;
        if num_bytes == 0 {
            return Ok(());
        }
        let ours = || fallocate(&self.file, FallocateFlags::empty(), 0, num_bytes);
        match retry_on_intr(ours) {
            // This file system cannot: a full disk will be an error of a write.
            Err(Errno::OPNOTSUPP) => self.file.set_len(num_bytes),
            result => Ok(result?),
        }
    }

    /// Reads a record into the front of `buffer`.
    pub(super) fn read(&self, record: usize, buffer: &Tensor, content: Content) -> Result<()> {
        let memory = self.front(record, buffer)?;
        let refused = |e| self.refused(Operation::Read, record, e);
        let written = match content {
            Content::Zeros => return bytes::zero(&memory).map_err(refused),
            Content::Lost => return Err(self.torn(record, Tear::WriteFailed)),
            Content::Written(checksum) => checksum,
        };
        bytes::read_at(&self.file, self.layout.offset(record), &memory).map_err(refused)?;
        let found = bytes::checksum(&memory).map_err(refused)?;
        if found != written {
            return Err(self.torn(record, Tear::Checksum { written, found }));
        }
        Ok(())
    }

    /// Writes a record from the front of `buffer` and returns its checksum.
    pub(super) fn write(&self, record: usize, buffer: &Tensor) -> Result<u32> {
        let memory = self.front(record, buffer)?;
        let refused = |e| self.refused(Operation::Write, record, e);
        let checksum = bytes::checksum(&memory).map_err(refused)?;
        bytes::write_at(&self.file, self.layout.offset(record), &memory).map_err(refused)?;
        Ok(checksum)
    }

    fn front(&self, record: usize, buffer: &Tensor) -> Result<Tensor> {
        Ok(buffer.f_narrow(0, 0, self.num_bytes(record) as i64)?)
    }

    /// Bytes of a record.
    pub(super) fn num_bytes(&self, record: usize) -> u64 {
        self.layout.records()[record].num_bytes() as u64
    }

    fn not_created(&self, source: io::Error) -> OffloadError {
        if is_full(&source) {
            return self.full(self.layout.num_bytes);
        }
        let path = self.path.clone();
        OffloadError::Create { path, source }
    }

    fn refused(&self, operation: Operation, record: usize, source: io::Error) -> OffloadError {
        if source.kind() == ErrorKind::UnexpectedEof {
            return self.torn(record, Tear::Short);
        }
        if is_full(&source) {
            return self.full(self.num_bytes(record));
        }
        OffloadError::Io {
            path: self.path.clone(),
            operation,
            record,
            offset: self.layout.offset(record),
            num_bytes: self.num_bytes(record),
            source,
        }
    }

    fn torn(&self, record: usize, cause: Tear) -> OffloadError {
        OffloadError::Torn {
            path: self.path.clone(),
            record,
            offset: self.layout.offset(record),
            num_bytes: self.num_bytes(record),
            cause,
        }
    }

    fn full(&self, needed: u64) -> OffloadError {
        let system = fstatvfs(&self.file).ok();
        OffloadError::DiskFull {
            path: self.path.clone(),
            needed,
            available: system.map(|of| of.f_bavail * of.f_frsize),
        }
    }
}

impl Drop for SpillFile {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), "cannot remove the offload file: {e}");
        }
    }
}

/// Whether the file is now ours alone; two jobs in one folder would ruin each other's state.
fn lock(file: &File) -> io::Result<bool> {
    match retry_on_intr(|| flock(file, FlockOperation::NonBlockingLockExclusive)) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

fn is_full(e: &io::Error) -> bool {
    matches!(e.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

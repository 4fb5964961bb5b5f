//! The offload file of a rank: preallocated at creation, removed on drop.
//!
//! It is a scratch file: no other process reads it, so it is never synced, and the checksums of its records stay in
//! memory. Unlike a checksum beside the data, that also detects a write that never reached the file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock, fstatvfs};
use rustix::io::{Errno, retry_on_intr};
use tch::Tensor;
use trainyard_torch::bytes;

use super::error::{Corruption, OffloadError, Operation, Result};
use super::record::Layout;

/// What the file contains for a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// Nothing yet; it reads as zeros.
    Zeros,
    /// Data with this checksum.
    Written(u32),
    /// Undefined data of a failed write.
    Lost,
}

/// An offload file and the layout of its records.
pub(super) struct SpillFile {
    file: File,
    path: PathBuf,
    pub layout: Layout,
}

impl SpillFile {
    /// Creates the directory and the file; overwrites a file that an earlier process left behind.
    pub(super) fn create(folder: &Path, rank: usize, layout: Layout) -> Result<SpillFile> {
        let path = folder.join(format!("rank-{rank}.spill"));
        let opened = fs::create_dir_all(folder).and_then(|()| {
            // Truncated only after the lock is held.
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            options.open(&path)
        });
        let file = match opened.and_then(|file| lock(&file).map(|is_locked| (file, is_locked))) {
            Ok((file, true)) => file,
            Ok((_, false)) => return Err(OffloadError::InUse { path }),
            Err(source) => return Err(OffloadError::Create { path, source }),
        };
        // From here on, dropping the value on an error removes the file.
        let spill = SpillFile { file, path, layout };
        spill.allocate().map_err(|e| spill.not_created(e))?;
        Ok(spill)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Allocates all disk space now, so that a full disk is detected before training starts.
    fn allocate(&self) -> io::Result<()> {
        let num_bytes = self.layout.num_bytes;
        self.file.set_len(0)?;
        if num_bytes == 0 {
            return Ok(());
        }
        let allocate = || fallocate(&self.file, FallocateFlags::empty(), 0, num_bytes);
        match retry_on_intr(allocate) {
            // The file system does not support it: a full disk will fail a write instead.
            Err(Errno::OPNOTSUPP) => self.file.set_len(num_bytes),
            result => Ok(result?),
        }
    }

    /// Reads a record into the front of `buffer`.
    pub(super) fn read(&self, record: usize, buffer: &Tensor, content: Content) -> Result<()> {
        let memory = self.front(record, buffer)?;
        let failed = |e| self.io_error(Operation::Read, record, e);
        let written = match content {
            Content::Zeros => return bytes::zero(&memory).map_err(failed),
            Content::Lost => return Err(self.corrupt(record, Corruption::WriteFailed)),
            Content::Written(checksum) => checksum,
        };
        bytes::read_at(&self.file, self.layout.offset(record), &memory).map_err(failed)?;
        let found = bytes::checksum(&memory).map_err(failed)?;
        if found != written {
            return Err(self.corrupt(record, Corruption::ChecksumMismatch { written, found }));
        }
        Ok(())
    }

    /// Writes a record from the front of `buffer` and returns its checksum.
    pub(super) fn write(&self, record: usize, buffer: &Tensor) -> Result<u32> {
        let memory = self.front(record, buffer)?;
        let failed = |e| self.io_error(Operation::Write, record, e);
        let checksum = bytes::checksum(&memory).map_err(failed)?;
        bytes::write_at(&self.file, self.layout.offset(record), &memory).map_err(failed)?;
        Ok(checksum)
    }

    fn front(&self, record: usize, buffer: &Tensor) -> Result<Tensor> {
        Ok(buffer.f_narrow(0, 0, self.num_bytes(record) as i64)?)
    }

    /// Length of a record in bytes.
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

    fn io_error(&self, operation: Operation, record: usize, source: io::Error) -> OffloadError {
        if source.kind() == ErrorKind::UnexpectedEof {
            return self.corrupt(record, Corruption::Truncated);
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

    fn corrupt(&self, record: usize, cause: Corruption) -> OffloadError {
        OffloadError::Corrupt {
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

/// Tries to lock the file exclusively; two jobs in one directory would corrupt each other's state.
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

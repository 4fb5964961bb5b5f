//! A store in a directory of a local or shared file system.
//!
//! Data survives a power failure only after an fsync of both the file and the directory that names it.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::{Store, Writer, too_short};
use crate::{CheckpointError, Lock, Result};

/// The suffix of a file before it is renamed to its final name.
const PARTIAL: &str = ".partial";

/// A store in a directory of a file system.
#[derive(Debug)]
pub struct LocalStore {
    root: PathBuf,
}

impl LocalStore {
    /// Opens the directory `root`. The first write creates it.
    pub fn new(root: impl Into<PathBuf>) -> LocalStore {
        LocalStore { root: root.into() }
    }

    fn absolute(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }
}

impl Store for LocalStore {
    fn describe(&self, path: &str) -> String {
        self.absolute(path).display().to_string()
    }

    fn create(&self, path: &str) -> Result<Box<dyn Writer>> {
        let path = self.absolute(path);
        make_parents(&path)?;
        let file = File::create(&path).map_err(io_error(&path))?;
        Ok(Box::new(LocalFile { path, file }))
    }

    fn put(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let path = self.absolute(path);
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(PARTIAL);
        let partial = path.with_file_name(name);
        make_parents(&path)?;
        let mut file = File::create(&partial).map_err(io_error(&partial))?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        written.map_err(io_error(&partial))?;
        fs::rename(&partial, &path).map_err(io_error(&path))?;
        sync_parent(&path)?;
        // The directory may be of a job that was killed before it synced its name.
        match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => sync_parent(dir),
            _ => Ok(()),
        }
    }

    fn size(&self, path: &str) -> Result<Option<u64>> {
        let path = self.absolute(path);
        match fs::metadata(&path) {
            Ok(metadata) => Ok(metadata.is_file().then_some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io_error(&path)(error)),
        }
    }

    fn read(&self, path: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let path = self.absolute(path);
        let file = File::open(&path).map_err(io_error(&path))?;
        let length = file.metadata().map_err(io_error(&path))?.len();
        // Check before allocating: a corrupted manifest can request a range of any size.
        if range.end > length || range.start > range.end {
            return Err(too_short(&path.display().to_string(), length, &range));
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let read = file.read_exact_at(&mut bytes, range.start);
        read.map_err(io_error(&path))?;
        Ok(bytes)
    }

    fn list(&self, dir: &str) -> Result<Vec<String>> {
        let dir = self.absolute(dir);
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(io_error(&dir))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(io_error(&dir))?.file_name();
            // We never create names that are not UTF-8.
            names.extend(name.into_string().ok());
        }
        names.sort();
        Ok(names)
    }

    fn remove(&self, path: &str) -> Result<()> {
        let path = self.absolute(path);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed
                .map_err(io_error(&path))
                .and_then(|()| sync_parent(&path)),
        }
    }

    fn remove_dir(&self, dir: &str) -> Result<()> {
        let dir = self.absolute(dir);
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(io_error(&dir)),
        }
    }

    fn available_bytes(&self) -> Result<Option<u64>> {
        let disk = rustix::fs::statvfs(&self.root).map_err(io::Error::from);
        let disk = disk.map_err(io_error(&self.root))?;
        Ok(Some(disk.f_bavail.saturating_mul(disk.f_frsize)))
    }

    fn lock(&self, path: &str, _is_superseded: bool) -> Result<Lock> {
        let path = self.absolute(path);
        make_parents(&path)?;
        let file = File::options().create(true).append(true).open(&path);
        let file = file.map_err(io_error(&path))?;
        match file.try_lock() {
            Ok(()) => Ok(Lock::Acquired(Box::new(file))),
            Err(TryLockError::WouldBlock) => Ok(Lock::Held),
            // Some network file systems have no locks.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                Ok(Lock::Unsupported)
            }
            Err(TryLockError::Error(error)) => Err(io_error(&path)(error)),
        }
    }
}

/// A file that is written under its final name: no reader opens it before a manifest names it.
struct LocalFile {
    path: PathBuf,
    file: File,
}

impl Writer for LocalFile {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(io_error(&self.path))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.file.sync_all().map_err(io_error(&self.path))?;
        sync_parent(&self.path)
    }
}

/// Creates the parent directories of a file and syncs their names to the disk.
fn make_parents(path: &Path) -> Result<()> {
    // The parent of a bare file name is the working directory, which exists.
    let is_missing = |parent: &&Path| !parent.as_os_str().is_empty() && !parent.exists();
    let Some(parent) = path.parent().filter(is_missing) else {
        return Ok(());
    };
    make_parents(parent)?;
    match fs::create_dir(parent) {
        // Another rank created it concurrently.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.map_err(io_error(parent))?,
    }
    sync_parent(parent)
}

fn sync_parent(path: &Path) -> Result<()> {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let synced = File::open(parent).and_then(|dir| dir.sync_all());
    synced.map_err(io_error(parent))
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    CheckpointError::io(path.display().to_string())
}

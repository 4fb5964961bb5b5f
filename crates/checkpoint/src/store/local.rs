//! A folder of a file system, local or shared.
//!
//! What has been written survives a power cut only after it was synced: files, and the folders that
//! name them.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::{Sink, Store, too_short};
use crate::{CheckpointError, Result};

/// Ends the name of a file that is not in its place yet.
const PARTIAL: &str = ".partial";

/// A folder.
#[derive(Debug)]
pub struct LocalStore {
    root: PathBuf,
}

impl LocalStore {
    /// The folder at `root`, which is made when something is written.
    pub fn new(root: impl Into<PathBuf>) -> LocalStore {
        LocalStore { root: root.into() }
    }

    fn place(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }
}

impl Store for LocalStore {
    fn describe(&self, path: &str) -> String {
        self.place(path).display().to_string()
    }

    fn create(&self, path: &str) -> Result<Box<dyn Sink>> {
        let path = self.place(path);
        make_parents(&path)?;
        let file = File::create(&path).map_err(refused(&path))?;
        Ok(Box::new(LocalFile { path, file }))
    }

    fn put(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let path = self.place(path);
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(PARTIAL);
        let partial = path.with_file_name(name);
        make_parents(&path)?;
        let mut file = File::create(&partial).map_err(refused(&partial))?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        written.map_err(refused(&partial))?;
        fs::rename(&partial, &path).map_err(refused(&path))?;
        sync_parent(&path)
    }

    fn size(&self, path: &str) -> Result<Option<u64>> {
        let path = self.place(path);
        match fs::metadata(&path) {
            Ok(metadata) => Ok(metadata.is_file().then_some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(refused(&path)(error)),
        }
    }

    fn read(&self, path: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let path = self.place(path);
        let file = File::open(&path).map_err(refused(&path))?;
        let length = file.metadata().map_err(refused(&path))?.len();
        // Before anything is allocated: a range beyond the end may be a wish without bounds.
        if range.end > length || range.start > range.end {
            return Err(too_short(&path.display().to_string(), length, &range));
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let read = file.read_exact_at(&mut bytes, range.start);
        read.map_err(refused(&path))?;
        Ok(bytes)
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let folder = self.place(folder);
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(refused(&folder))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(refused(&folder))?.file_name();
            // Names that are no text are nobody's of ours.
            names.extend(name.into_string().ok());
        }
        names.sort();
        Ok(names)
    }

    fn remove(&self, path: &str) -> Result<()> {
        let path = self.place(path);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed
                .map_err(refused(&path))
                .and_then(|()| sync_parent(&path)),
        }
    }

    fn remove_folder(&self, folder: &str) -> Result<()> {
        let folder = self.place(folder);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(refused(&folder)),
        }
    }
}

/// A file under its final name: nobody reads it before a manifest names it.
struct LocalFile {
    path: PathBuf,
    file: File,
}

impl Sink for LocalFile {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(refused(&self.path))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.file.sync_all().map_err(refused(&self.path))?;
        sync_parent(&self.path)
    }
}

/// Makes the folders above a file; their names are on the disk when this returns.
fn make_parents(path: &Path) -> Result<()> {
    // The folder above a name alone is this one, which is there.
    let is_missing = |parent: &&Path| !parent.as_os_str().is_empty() && !parent.exists();
    let Some(parent) = path.parent().filter(is_missing) else {
        return Ok(());
    };
    make_parents(parent)?;
    match fs::create_dir(parent) {
        // Another rank was faster.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.map_err(refused(parent))?,
    }
    sync_parent(parent)
}

fn sync_parent(path: &Path) -> Result<()> {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let synced = File::open(parent).and_then(|folder| folder.sync_all());
    synced.map_err(refused(parent))
}

fn refused(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    CheckpointError::io(path.display().to_string())
}

//! What has been written survives a power cut only after it was synced: files, and the folders
//! that name them.

use std::fs::{self, File};
use std::path::Path;

use crate::{CheckpointError, Result};

/// Returns when the file or folder at `path` is on the disk.
pub(crate) fn sync(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(CheckpointError::io(path))
}

/// Renames a folder; the change is on the disk when this returns.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(CheckpointError::io(from))?;
    to.parent().map_or(Ok(()), sync)
}

//! Atomic file creation: a file exists completely or not at all.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::{Result, TokenizeError};

/// The temporary name of a file that is not complete yet.
pub(crate) fn partial(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

/// Writes a file under its temporary name and renames it.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let partial = partial(path);
    let mut file = File::create(&partial).map_err(TokenizeError::io(&partial))?;
    file.write_all(bytes).map_err(TokenizeError::io(&partial))?;
    publish(&file, path)
}

/// Syncs a file that was written under its [`partial`] name, renames it to `path`, and syncs the directory.
pub(crate) fn publish(file: &File, path: &Path) -> Result<()> {
    let partial = partial(path);
    file.sync_all().map_err(TokenizeError::io(&partial))?;
    fs::rename(&partial, path).map_err(TokenizeError::io(path))?;
    let dir = path.parent().unwrap_or(Path::new("."));
    let synced = File::open(dir).and_then(|dir| dir.sync_all());
    synced.map_err(TokenizeError::io(dir))
}

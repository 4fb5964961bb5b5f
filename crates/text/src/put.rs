//! Files that appear whole or not at all.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::{Result, TextError};

/// The name of a file that is not whole yet.
pub(crate) fn partial(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

/// Writes a file under another name, and publishes it.
pub(crate) fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    let partial = partial(path);
    let mut file = File::create(&partial).map_err(TextError::io(&partial))?;
    file.write_all(bytes).map_err(TextError::io(&partial))?;
    publish(&file, path)
}

/// Syncs a file that was written as [`partial`], and renames it into place; the name is on the disk too
/// when this returns.
pub(crate) fn publish(file: &File, path: &Path) -> Result<()> {
    let partial = partial(path);
    file.sync_all().map_err(TextError::io(&partial))?;
    fs::rename(&partial, path).map_err(TextError::io(path))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(TextError::io(folder))
}

//! The input files in a directory.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Result, TokenizeError};

/// A file itself, or all files in a directory and below, in the order of their names. Hidden ones (`.git`) are left out.
pub fn files_in(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = fs::read_dir(path).map_err(TokenizeError::io(path))?;
    let mut inner = entries
        .map(|entry| Ok(entry.map_err(TokenizeError::io(path))?.path()))
        .collect::<Result<Vec<PathBuf>>>()?;
    inner.retain(|path| !is_hidden(path));
    inner.sort();
    let files = inner.iter().map(|path| files_in(path));
    Ok(files.collect::<Result<Vec<_>>>()?.concat())
}

fn is_hidden(path: &Path) -> bool {
    let name = path.file_name();
    name.is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_in_order() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.txt", "a/c.txt", "a/a.txt", ".git/config", "a/.hidden"] {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "text").unwrap();
        }
        let found = files_in(dir.path()).unwrap();
        let expected = ["a/a.txt", "a/c.txt", "b.txt"].map(|name| dir.path().join(name));
        assert_eq!(found, expected);
        assert_eq!(files_in(&expected[2]).unwrap(), [expected[2].clone()]);
    }
}

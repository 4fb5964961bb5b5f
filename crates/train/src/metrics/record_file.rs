//! A file of metrics that holds whole records only. Training does not end because a metric cannot be written.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use crate::{Result, TrainError};

/// A file that records are appended to. A record that cannot be written whole, because the disk is full for example,
/// is left out with a warning; later ones are written when there is room again.
pub(super) struct RecordFile {
    path: PathBuf,
    file: File,
    /// The length of the file up to the last whole record.
    length: u64,
    is_failing: bool,
}

impl RecordFile {
    /// Appends to `file`, which was opened for appending at `path`.
    pub(super) fn new(path: PathBuf, file: File) -> Result<RecordFile> {
        let metadata = file.metadata().map_err(TrainError::io(&path))?;
        Ok(RecordFile {
            path,
            file,
            length: metadata.len(),
            is_failing: false,
        })
    }

    /// Appends a record with a single write, so that a reader never sees a part of it.
    pub(super) fn append(&mut self, record: &[u8]) {
        match self.file.write_all(record) {
            Ok(()) => {
                self.length += record.len() as u64;
                self.is_failing = false;
            }
            Err(error) => {
                // Removes what was written of the record. If that fails too, readers see a damaged record.
                let _ = self.file.set_len(self.length);
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!(
                        "metrics are missing in {} until it can be written again: {error}",
                        self.path.display()
                    );
                }
            }
        }
    }

    /// Where the records are.
    #[cfg(test)]
    pub(super) fn path(&self) -> &std::path::Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_full_disk_ends_nothing() {
        let full = fs::OpenOptions::new().append(true).open("/dev/full");
        let mut file = RecordFile::new("/dev/full".into(), full.unwrap()).unwrap();
        file.append(b"1\n");
        assert!(file.is_failing);
    }

    #[test]
    fn records_continue_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records");
        for record in [b"1\n", b"2\n"] {
            let open = fs::OpenOptions::new().create(true).append(true).open(&path);
            let mut file = RecordFile::new(path.clone(), open.unwrap()).unwrap();
            file.append(record);
            assert_eq!(file.length, fs::metadata(&path).unwrap().len());
        }
        assert_eq!(fs::read(&path).unwrap(), b"1\n2\n");
    }
}

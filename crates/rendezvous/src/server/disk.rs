//! The record in a file: the old one or the new one, whole, whenever the power goes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::{Record, RendezvousError};

/// A record of the largest world has not a tenth of this.
const LARGEST: u64 = 64 << 20;

/// Where the record of a run is kept.
#[derive(Clone, Debug)]
pub struct Disk {
    path: PathBuf,
}

impl Disk {
    /// Opens the file, which need not be there; returns the record in it.
    pub fn open(path: &Path, run: &str) -> Result<(Disk, Record), RendezvousError> {
        let disk = Disk {
            path: path.to_owned(),
        };
        let unreadable = |cause: String| RendezvousError::Unreadable {
            what: format!("the record {}", path.display()),
            run: run.to_owned(),
            cause,
        };
        let length = match fs::metadata(path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok((disk, Record::new(run)));
            }
            Err(error) => return Err(unreadable(error.to_string())),
        };
        if length > LARGEST {
            return Err(unreadable(format!("{length} bytes are no record")));
        }
        let bytes = fs::read(path).map_err(|error| unreadable(error.to_string()))?;
        let record: Record =
            serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
        if record.run != run {
            return Err(unreadable(format!("it is of run `{}`", record.run)));
        }
        Ok((disk, record))
    }

    /// Returns when the record survives a power cut.
    pub fn write(&self, record: &Record) -> Result<(), RendezvousError> {
        self.try_write(record)
            .map_err(|error| RendezvousError::Disk {
                path: self.path.display().to_string(),
                cause: error.to_string(),
            })
    }

    fn try_write(&self, record: &Record) -> io::Result<()> {
        let bytes = serde_json::to_vec(record)?;
        let mut beside = self.path.clone().into_os_string();
        beside.push(".new");
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&beside)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        fs::rename(&beside, &self.path)?;
        let folder = self
            .path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }
}

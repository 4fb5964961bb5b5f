//! The run state in a file. A crash or a power failure leaves the old state or the new one, never a mix.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::format::{self, FormatError};
use crate::{FORMAT_VERSION, RendezvousError, RunState};

/// Ten times the size of the state of the largest world.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The file that stores the state of a run.
#[derive(Clone, Debug)]
pub struct RecordFile {
    path: PathBuf,
}

impl RecordFile {
    /// Opens the file and returns the state in it; a new state if the file does not exist.
    pub fn open(path: &Path, run: &str) -> Result<(RecordFile, RunState), RendezvousError> {
        let file = RecordFile {
            path: path.to_owned(),
        };
        let run_state = match fs::metadata(path) {
            Ok(metadata) => file.read(run, metadata.len())?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => RunState::new(run),
            Err(error) => return Err(file.unreadable(run, error.to_string())),
        };
        Ok((file, run_state))
    }

    fn read(&self, run: &str, length: u64) -> Result<RunState, RendezvousError> {
        if length > MAX_FILE_BYTES {
            let cause = format!("{length} bytes are too many; the maximum is {MAX_FILE_BYTES}");
            return Err(self.unreadable(run, cause));
        }
        let bytes =
            fs::read(&self.path).map_err(|error| self.unreadable(run, error.to_string()))?;
        let run_state: RunState = format::decode(&bytes).map_err(|error| match error {
            FormatError::Version { found } => RendezvousError::FormatVersion {
                what: self.describe(),
                run: run.to_owned(),
                found,
                supported: FORMAT_VERSION,
            },
            FormatError::Malformed(cause) => self.unreadable(run, cause),
        })?;
        if run_state.run == run {
            Ok(run_state)
        } else {
            Err(self.unreadable(run, format!("it belongs to run `{}`", run_state.run)))
        }
    }

    fn describe(&self) -> String {
        format!("the record file {}", self.path.display())
    }

    fn unreadable(&self, run: &str, cause: String) -> RendezvousError {
        RendezvousError::Unreadable {
            what: self.describe(),
            run: run.to_owned(),
            cause,
        }
    }

    /// Writes the state, and returns when it would survive a power failure.
    pub fn write(&self, run_state: &RunState) -> Result<(), RendezvousError> {
        self.try_write(run_state)
            .map_err(|error| self.write_error(error.to_string()))
    }

    /// The error for a state that could not be written.
    pub fn write_error(&self, cause: String) -> RendezvousError {
        RendezvousError::RecordWrite {
            path: self.path.display().to_string(),
            cause,
        }
    }

    fn try_write(&self, run_state: &RunState) -> io::Result<()> {
        let bytes = format::encode(run_state)?;
        let mut temporary = self.path.clone().into_os_string();
        temporary.push(".new");
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, &self.path)?;
        let dir = self.path.parent().filter(|dir| !dir.as_os_str().is_empty());
        File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
    }
}

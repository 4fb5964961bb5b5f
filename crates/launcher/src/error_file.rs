//! Error files of PyTorch's `@record`: the exception that ended a rank.
//!
//! Every worker finds the path of a file of its own in `TORCHELASTIC_ERROR_FILE`, and writes its exception there before
//! it exits. Schedulers that start launchers do the same: the launcher passes on the error of the rank that failed
//! first.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tempfile::TempDir;

use crate::Job;

/// The variable with the path.
pub(crate) const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";

/// A traceback can be long; a file that is longer than this is no error file.
const MAX_BYTES: u64 = 1 << 20;

/// The error files of a job's ranks.
#[derive(Debug)]
pub(crate) struct ErrorFiles {
    dir: PathBuf,
    /// Removes the directory, unless it is that of the log files.
    _temporary: Option<TempDir>,
}

impl ErrorFiles {
    /// Beside the log files, or in a temporary directory. Failures are only logged: the output of a rank also says how it
    /// failed.
    pub(crate) fn create(job: &Job) -> Option<ErrorFiles> {
        if let Some(dir) = &job.output.log_dir {
            return Some(ErrorFiles {
                dir: dir.clone(),
                _temporary: None,
            });
        }
        let temporary = tempfile::Builder::new()
            .prefix("trainyard-errors-")
            .tempdir();
        let temporary = temporary
            .inspect_err(|error| tracing::warn!("ranks cannot record their errors: {error}"))
            .ok()?;
        Some(ErrorFiles {
            dir: temporary.path().to_owned(),
            _temporary: Some(temporary),
        })
    }

    /// The file of a local rank.
    pub(crate) fn path(&self, local_rank: usize) -> PathBuf {
        self.dir.join(local_rank.to_string()).join("error.json")
    }

    /// The file of a local rank that starts: its directory exists, and the file does not.
    pub(crate) fn prepare(&self, local_rank: usize) -> PathBuf {
        let path = self.path(local_rank);
        let _ = path.parent().map(fs::create_dir_all);
        let _ = fs::remove_file(&path);
        path
    }
}

/// The exception that a rank has recorded.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RecordedError {
    file: Value,
}

impl RecordedError {
    /// Reads the file of a rank; `None` if it has recorded no error.
    pub(crate) fn read(path: &Path) -> io::Result<Option<RecordedError>> {
        match fs::metadata(path) {
            Ok(metadata) if metadata.len() == 0 => return Ok(None),
            Ok(metadata) if metadata.len() > MAX_BYTES => {
                return Err(io::Error::other("it is too large for an error file"));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let file = serde_json::from_slice(&fs::read(path)?)?;
        Ok(Some(RecordedError { file }))
    }

    /// The traceback, or else the message.
    pub fn text(&self) -> Option<&str> {
        let message = &self.file["message"];
        let traceback = message["extraInfo"]["py_callstack"].as_str();
        let texts = [traceback, message["message"].as_str(), message.as_str()];
        texts.into_iter().flatten().find(|text| !text.is_empty())
    }

    /// Passes the error of a rank on to the program that started this one, if it asked for it.
    pub fn forward_to_parent(self, exit_code: i64) -> io::Result<()> {
        match std::env::var_os(ERROR_FILE).filter(|path| !path.is_empty()) {
            Some(path) => self.forward(Path::new(&path), exit_code),
            None => Ok(()),
        }
    }

    /// Passes the error on to who started the launcher, with the exit code of the rank, which is negative for a signal.
    fn forward(mut self, path: &Path, exit_code: i64) -> io::Result<()> {
        if let Some(message) = self.file.get_mut("message").and_then(Value::as_object_mut) {
            let message: &mut Map<String, Value> = message;
            message.insert("errorCode".to_owned(), exit_code.into());
        }
        fs::write(path, serde_json::to_vec(&self.file)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> io::Result<Option<RecordedError>> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("error.json");
        fs::write(&path, text)?;
        RecordedError::read(&path)
    }

    #[test]
    fn the_traceback_is_preferred() -> io::Result<()> {
        let recorded = read(
            r#"{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback: x", "timestamp": "17"}}}"#,
        )?;
        assert_eq!(
            recorded.as_ref().and_then(RecordedError::text),
            Some("Traceback: x")
        );
        let recorded = read(r#"{"message": "killed", "timestamp": 17}"#)?;
        assert_eq!(
            recorded.as_ref().and_then(RecordedError::text),
            Some("killed")
        );
        assert_eq!(read("{}")?.as_ref().and_then(RecordedError::text), None);
        assert_eq!(read("")?, None);
        assert!(read("Traceback").is_err());
        let dir = tempfile::tempdir()?;
        assert_eq!(RecordedError::read(&dir.path().join("missing"))?, None);
        Ok(())
    }

    #[test]
    fn who_started_the_launcher_gets_the_exit_code_as_well() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("reply.json");
        let recorded =
            read(r#"{"message": {"message": "ValueError: x"}}"#)?.ok_or(io::ErrorKind::NotFound)?;
        recorded.forward(&path, -9)?;
        let forwarded: Value = serde_json::from_slice(&fs::read(&path)?)?;
        assert_eq!(forwarded["message"]["errorCode"], -9);
        assert_eq!(forwarded["message"]["message"], "ValueError: x");
        Ok(())
    }
}

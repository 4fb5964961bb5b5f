//! Metrics as JSON Lines: one object per reported step, for programs to read.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use super::StepMetrics;
use crate::{Result, TrainError};

/// A file with one line per reported step; a resumed run appends to it.
pub struct JsonLines {
    path: PathBuf,
    file: File,
}

impl JsonLines {
    /// Opens the file for appending; creates it and its directory if they are missing.
    pub fn append(path: impl Into<PathBuf>) -> Result<JsonLines> {
        let path = path.into();
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(TrainError::io(folder))?;
        }
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(TrainError::io(&path))?;
        Ok(JsonLines { path, file })
    }

    /// Writes one line. NaN and infinities become `null`.
    pub fn write(&mut self, metrics: &StepMetrics) -> Result<()> {
        let mut line = serde_json::to_vec(metrics)
            .map_err(|error| TrainError::io(&self.path)(error.into()))?;
        line.push(b'\n');
        // A single write, so that a reader never sees a partial line.
        self.file
            .write_all(&line)
            .map_err(TrainError::io(&self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_appended_and_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/metrics.jsonl");
        let steps = [1, 2].map(|step| StepMetrics {
            step,
            loss: 1.25,
            mfu: (step == 2).then_some(0.25),
            ..StepMetrics::default()
        });
        for metrics in &steps {
            JsonLines::append(&path).unwrap().write(metrics).unwrap();
        }
        let text = fs::read_to_string(&path).unwrap();
        let read = text.lines().map(|line| serde_json::from_str(line).unwrap());
        assert_eq!(read.collect::<Vec<StepMetrics>>(), steps);
    }

    #[test]
    fn nan_becomes_null() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let diverged = StepMetrics {
            loss: f64::NAN,
            ..StepMetrics::default()
        };
        JsonLines::append(&path).unwrap().write(&diverged).unwrap();
        assert!(
            fs::read_to_string(&path)
                .unwrap()
                .contains(r#""loss":null"#)
        );
    }
}

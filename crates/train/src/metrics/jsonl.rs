//! Metrics as JSON Lines: one object per reported step or evaluation, for programs to read.

use std::fs::{self, OpenOptions};
use std::path::PathBuf;

use serde::Serialize;

use super::record_file::RecordFile;
use super::{MetricSink, StepMetrics, ValidationMetrics};
use crate::{Result, TrainError};

/// A file with one line per reported step or evaluation; a resumed run appends to it.
pub struct JsonLines(RecordFile);

impl JsonLines {
    /// Opens the file for appending; creates it and its directory if they are missing.
    pub fn append(path: impl Into<PathBuf>) -> Result<JsonLines> {
        let path = path.into();
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(TrainError::io(folder))?;
        }
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(TrainError::io(&path))?;
        Ok(JsonLines(RecordFile::new(path, file)?))
    }

    /// Writes one line. NaN and infinities become `null`.
    fn append_line(&mut self, metrics: &impl Serialize) {
        match serde_json::to_vec(metrics) {
            Ok(mut line) => {
                line.push(b'\n');
                self.0.append(&line);
            }
            Err(error) => tracing::warn!("metrics cannot be written as JSON: {error}"),
        }
    }
}

impl MetricSink for JsonLines {
    fn write(&mut self, metrics: &StepMetrics) {
        self.append_line(metrics);
    }

    fn write_validation(&mut self, metrics: &ValidationMetrics) {
        self.append_line(metrics);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::StepMetrics;

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
            JsonLines::append(&path).unwrap().write(metrics);
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
        JsonLines::append(&path).unwrap().write(&diverged);
        assert!(
            fs::read_to_string(&path)
                .unwrap()
                .contains(r#""loss":null"#)
        );
    }
}

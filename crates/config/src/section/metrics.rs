//! `[metrics]`: what is reported while training.

use std::path::PathBuf;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::{at_least_one, within};
use crate::ConfigError;

/// `[metrics]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsSection {
    /// Steps between two log lines.
    pub log_freq: u64,
    /// Whether TensorBoard files are written.
    pub enable_tensorboard: bool,
    /// Folder for TensorBoard files, under `job.dump_folder`.
    pub save_tb_folder: PathBuf,
    /// Whether metrics are written as JSON lines.
    pub enable_jsonl: bool,
    /// Whether log lines are printed without color.
    pub disable_color_printing: bool,
    /// The TFLOP/s of a device, to which model FLOPs utilization (MFU) refers. Absent: those that the vendor specifies
    /// for 16 bits if the GPU is a known one, and on CPU what a matrix product reaches.
    pub peak_tflops: Option<f64>,
    /// Whether a progress bar is shown on a terminal.
    pub progress: bool,
}

impl Default for MetricsSection {
    fn default() -> Self {
        MetricsSection {
            log_freq: 10,
            enable_tensorboard: false,
            save_tb_folder: "tb".into(),
            enable_jsonl: false,
            disable_color_printing: false,
            peak_tflops: None,
            progress: true,
        }
    }
}

impl MetricsSection {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        at_least_one("metrics.log_freq", self.log_freq)?;
        let peak = self.peak_tflops.unwrap_or(1.0);
        within("metrics.peak_tflops", peak, f64::MIN_POSITIVE, 1e6)
    }
}

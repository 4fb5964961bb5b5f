//! Metrics of a run: log lines, a progress bar, JSON Lines, TensorBoard.
//!
//! Every sink writes the same [`StepMetrics`] and [`ValidationMetrics`] in its own format. Only rank 0 writes; on
//! other ranks the sinks do nothing, so that the training loop is the same on every rank.

mod event;
mod jsonl;
mod line;
mod progress;
mod record_file;
mod run_summary;
mod step_metrics;
mod tensorboard;
mod validation_metrics;

use std::io::{self, Write};

use anstream::{AutoStream, ColorChoice};

use crate::{Result, TrainSpec};

pub use jsonl::JsonLines;
pub use line::line;
pub use progress::Progress;
pub use run_summary::RunSummary;
pub use step_metrics::StepMetrics;
pub use tensorboard::TensorBoard;
pub use validation_metrics::ValidationMetrics;

/// The JSON Lines file in the dump folder of a job.
const JSONL_FILE: &str = "metrics.jsonl";

/// The metric sinks of a rank.
pub struct Sinks {
    log_freq: u64,
    /// Set on rank 0 only.
    writers: Option<Writers>,
}

struct Writers {
    color: bool,
    progress: Progress,
    sinks: Vec<Box<dyn MetricSink>>,
}

/// Where rank 0 writes metrics to. Training does not end because they cannot be written.
pub trait MetricSink {
    /// Writes the metrics of a reported step.
    fn write(&mut self, metrics: &StepMetrics);

    /// Writes the metrics of an evaluation.
    fn write_validation(&mut self, metrics: &ValidationMetrics);
}

impl Sinks {
    /// Opens the sinks that the config enables, for a run that starts after `first_step` steps.
    pub fn open(spec: &TrainSpec, rank: usize, first_step: u64) -> Result<Sinks> {
        let writers = match rank {
            0 => Some(Writers::new(spec, first_step)?),
            _ => None,
        };
        Ok(Sinks {
            log_freq: spec.metrics.log_freq.max(1),
            writers,
        })
    }

    /// Whether a step, counted from 1, is reported. The result is the same on every rank.
    pub fn is_due(&self, step: u64) -> bool {
        step == 1 || step.is_multiple_of(self.log_freq)
    }

    /// Moves the progress bar to `step` completed steps.
    pub fn advance(&self, step: u64) {
        if let Some(writers) = &self.writers {
            writers.progress.advance(step);
        }
    }

    /// Writes the metrics of a step to all sinks.
    pub fn write(&mut self, metrics: &StepMetrics) {
        if let Some(writers) = &mut self.writers {
            writers.write(metrics);
        }
    }

    /// Writes the metrics of an evaluation to all sinks.
    pub fn write_validation(&mut self, metrics: &ValidationMetrics) {
        if let Some(writers) = &mut self.writers {
            writers.write_validation(metrics);
        }
    }

    /// Clears the progress bar, so that later output starts on a line of its own.
    pub fn finish(&self) {
        if let Some(writers) = &self.writers {
            writers.progress.finish();
        }
    }
}

impl Writers {
    fn new(spec: &TrainSpec, first_step: u64) -> Result<Writers> {
        let (section, folder) = (&spec.metrics, &spec.job.dump_folder);
        let mut sinks: Vec<Box<dyn MetricSink>> = Vec::new();
        if section.enable_jsonl {
            sinks.push(Box::new(JsonLines::append(folder.join(JSONL_FILE))?));
        }
        if section.enable_tensorboard {
            let folder = folder.join(&section.save_tb_folder);
            sinks.push(Box::new(TensorBoard::create(folder)?));
        }
        sinks.extend(spec.registry().open_sinks(spec)?);
        Ok(Writers {
            color: !section.disable_color_printing
                && AutoStream::choice(&io::stdout()) != ColorChoice::Never,
            progress: if section.progress {
                Progress::on_terminal(spec.training.steps, first_step)
            } else {
                Progress::hidden()
            },
            sinks,
        })
    }

    fn write(&mut self, metrics: &StepMetrics) {
        self.print(&line(metrics, self.color));
        for sink in &mut self.sinks {
            sink.write(metrics);
        }
    }

    fn write_validation(&mut self, metrics: &ValidationMetrics) {
        self.print(&metrics.to_string());
        for sink in &mut self.sinks {
            sink.write_validation(metrics);
        }
    }

    /// Prints a line. Training does not end because it cannot be written.
    fn print(&self, line: &str) {
        self.progress
            .suspend(|| drop(writeln!(io::stdout(), "{line}")));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use trainyard_config::Config;

    use super::*;

    fn config(folder: &Path) -> Config {
        let mut config = Config::default();
        config.job.dump_folder = folder.to_owned();
        config.metrics.enable_jsonl = true;
        config.metrics.enable_tensorboard = true;
        config.metrics.log_freq = 5;
        config
    }

    #[test]
    fn only_rank_0_writes() {
        let folder = tempfile::tempdir().unwrap();
        let silent = folder.path().join("silent");
        let mut sinks = Sinks::open(&TrainSpec::from(&config(&silent)), 1, 0).unwrap();
        sinks.advance(1);
        sinks.write(&StepMetrics::default());
        sinks.finish();
        assert!(!silent.exists());

        let written = folder.path().join("written");
        let mut sinks = Sinks::open(&TrainSpec::from(&config(&written)), 0, 0).unwrap();
        sinks.advance(1);
        sinks.write(&StepMetrics::default());
        sinks.finish();
        assert!(written.join("metrics.jsonl").is_file());
        assert_eq!(written.join("tb").read_dir().unwrap().count(), 1);
    }

    #[test]
    fn ranks_agree_on_when_to_report() {
        let folder = tempfile::tempdir().unwrap();
        for rank in [0, 3] {
            let sinks = Sinks::open(&TrainSpec::from(&config(folder.path())), rank, 0).unwrap();
            let due: Vec<u64> = (1..=11).filter(|&step| sinks.is_due(step)).collect();
            assert_eq!(due, [1, 5, 10]);
        }
    }
}

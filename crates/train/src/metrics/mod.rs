//! What a run tells while it goes: a log line, a bar, JSON lines, TensorBoard files.
//!
//! One [`StepMetrics`] is measured, and every sink writes it in its own form. Only rank 0 writes;
//! on other ranks the sinks are there and silent, so that the loop is the same everywhere.

mod event;
mod jsonl;
mod line;
mod progress;
mod record;
mod tensorboard;

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use trainyard_config::Config;

use crate::{Result, TrainError};

pub use jsonl::JsonLines;
pub use line::line;
pub use progress::Progress;
pub use record::StepMetrics;
pub use tensorboard::TensorBoard;

/// The file of JSON lines in a job's folder.
const JSONL_FILE: &str = "metrics.jsonl";

/// Where a rank's metrics go.
pub struct Sinks {
    log_freq: u64,
    /// Absent on ranks that do not write.
    open: Option<Open>,
}

struct Open {
    color: bool,
    progress: Progress,
    jsonl: Option<JsonLines>,
    tensorboard: Option<TensorBoard>,
}

impl Sinks {
    /// The sinks a config asks for, going on after `first_step` steps.
    pub fn open(config: &Config, rank: usize, first_step: u64) -> Result<Sinks> {
        let open = match rank {
            0 => Some(Open::new(config, first_step)?),
            _ => None,
        };
        Ok(Sinks {
            log_freq: config.metrics.log_freq.max(1),
            open,
        })
    }

    /// Whether a step, counted from 1, is reported. The same on every rank.
    pub fn is_due(&self, step: u64) -> bool {
        step == 1 || step.is_multiple_of(self.log_freq)
    }

    /// Tells that `step` steps are done.
    pub fn advance(&self, step: u64) {
        if let Some(open) = &self.open {
            open.progress.advance(step);
        }
    }

    /// Writes the metrics of a step everywhere.
    pub fn write(&mut self, metrics: &StepMetrics) -> Result<()> {
        match &mut self.open {
            Some(open) => open.write(metrics),
            None => Ok(()),
        }
    }

    /// Clears the bar, so that what follows stands on lines of its own.
    pub fn finish(&self) {
        if let Some(open) = &self.open {
            open.progress.finish();
        }
    }
}

impl Open {
    fn new(config: &Config, first_step: u64) -> Result<Open> {
        let (section, folder) = (&config.metrics, &config.job.dump_folder);
        let jsonl = || JsonLines::append(folder.join(JSONL_FILE));
        let tensorboard = || TensorBoard::create(folder.join(&section.save_tb_folder));
        Ok(Open {
            color: !section.disable_color_printing && io::stdout().is_terminal(),
            progress: match section.progress {
                true => Progress::on_terminal(config.training.steps, first_step),
                false => Progress::hidden(),
            },
            jsonl: section.enable_jsonl.then(jsonl).transpose()?,
            tensorboard: section.enable_tensorboard.then(tensorboard).transpose()?,
        })
    }

    fn write(&mut self, metrics: &StepMetrics) -> Result<()> {
        let text = line(metrics, self.color);
        self.progress.suspend(|| {
            writeln!(io::stdout(), "{text}").map_err(TrainError::io(Path::new("stdout")))
        })?;
        if let Some(jsonl) = &mut self.jsonl {
            jsonl.write(metrics)?;
        }
        if let Some(tensorboard) = &mut self.tensorboard {
            tensorboard.write(metrics)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
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
    fn only_the_first_rank_writes() {
        let folder = tempfile::tempdir().unwrap();
        let silent = folder.path().join("silent");
        let mut sinks = Sinks::open(&config(&silent), 1, 0).unwrap();
        sinks.advance(1);
        sinks.write(&StepMetrics::default()).unwrap();
        sinks.finish();
        assert!(!silent.exists());

        let told = folder.path().join("told");
        let mut sinks = Sinks::open(&config(&told), 0, 0).unwrap();
        sinks.advance(1);
        sinks.write(&StepMetrics::default()).unwrap();
        sinks.finish();
        assert!(told.join("metrics.jsonl").is_file());
        assert_eq!(told.join("tb").read_dir().unwrap().count(), 1);
    }

    #[test]
    fn ranks_agree_on_when_to_report() {
        let folder = tempfile::tempdir().unwrap();
        for rank in [0, 3] {
            let sinks = Sinks::open(&config(folder.path()), rank, 0).unwrap();
            let due: Vec<u64> = (1..=11).filter(|&step| sinks.is_due(step)).collect();
            assert_eq!(due, [1, 5, 10]);
        }
    }
}

//! Which samples were trained on, in which step: what shows that none was missed or seen twice.
//!
//! A line per step, `step: sample sample ...`, in a file per data-parallel rank; a run that begins writes
//! `after step N on R ranks` first, since what an earlier run did beyond that step counts no more.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use trainyard_config::Config;
use trainyard_data::Batch;
use trainyard_torch::World;

use crate::error::{Result, TrainError};
use crate::trainer::data_axes;

/// The log of one rank.
pub(crate) struct SampleLog {
    path: PathBuf,
    file: File,
}

impl SampleLog {
    /// The log a config asks for, on ranks that do not see the same samples as others before them.
    pub(crate) fn from_config(config: &Config, world: &World, after: u64) -> Result<Option<Self>> {
        let Some(folder) = &config.debug.sample_log_folder else {
            return Ok(None);
        };
        let data = world.group(data_axes())?;
        let first_of_those = world.mesh().group(world.rank(), data_axes())?;
        // Ranks that share samples are told apart by their other coordinates; the first ones write.
        let is_first = first_of_those.first() == Some(&0);
        if !is_first {
            return Ok(None);
        }
        let folder = config.job.dump_folder.join(folder);
        fs::create_dir_all(&folder).map_err(TrainError::io(&folder))?;
        let path = folder.join(format!("rank{}.log", data.index()));
        let opened = OpenOptions::new().create(true).append(true).open(&path);
        let file = opened.map_err(TrainError::io(&path))?;
        let mut log = SampleLog { path, file };
        log.line(&format!("after step {after} on {} ranks\n", world.size()))?;
        Ok(Some(log))
    }

    /// Notes what a step was taken with.
    pub(crate) fn write(&mut self, step: u64, batches: &[Batch]) -> Result<()> {
        let samples = batches.iter().flat_map(|batch| &batch.samples);
        let samples: Vec<String> = samples.map(u64::to_string).collect();
        self.line(&format!("{step}: {}\n", samples.join(" ")))
    }

    /// In one write, so that a killed rank leaves no half of one.
    fn line(&mut self, line: &str) -> Result<()> {
        let written = self.file.write_all(line.as_bytes());
        written.map_err(TrainError::io(&self.path))
    }
}

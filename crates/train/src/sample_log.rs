//! A log of the samples of every step, to verify that a resumed job skips and repeats none.
//!
//! Each data-parallel rank has a file with a line per step, `step: sample sample ...`. A run starts with
//! the line `after step N on R ranks`: steps beyond N of an earlier run were lost and do not count.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use trainyard_config::Config;
use trainyard_data::Batch;
use trainyard_torch::World;

use crate::error::{Result, TrainError};
use crate::trainer::data_axes;

/// The sample log of one data-parallel rank.
pub(crate) struct SampleLog {
    path: PathBuf,
    file: File,
}

impl SampleLog {
    /// Opens the log if the config enables it and this rank is the first one with its samples.
    pub(crate) fn from_config(config: &Config, world: &World, after: u64) -> Result<Option<Self>> {
        let Some(folder) = &config.debug.sample_log_folder else {
            return Ok(None);
        };
        let data = world.group(data_axes())?;
        let members = world.mesh().group(world.rank(), data_axes())?;
        // Ranks with the same samples differ in their other coordinates; those of rank 0's group write.
        let is_first = members.first() == Some(&0);
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

    /// Writes the samples of a step.
    pub(crate) fn write(&mut self, step: u64, batches: &[Batch]) -> Result<()> {
        let samples = batches.iter().flat_map(|batch| &batch.samples);
        let samples: Vec<String> = samples.map(u64::to_string).collect();
        self.line(&format!("{step}: {}\n", samples.join(" ")))
    }

    /// Appends a line with a single write, so that a killed rank leaves no partial line.
    fn line(&mut self, line: &str) -> Result<()> {
        let written = self.file.write_all(line.as_bytes());
        written.map_err(TrainError::io(&self.path))
    }
}

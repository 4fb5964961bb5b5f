//! `[profiling]`: traces and memory reports.

use std::path::PathBuf;

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

use super::at_least_one;
use crate::ConfigError;

/// `[profiling]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct ProfilingSection {
    /// Whether traces are written.
    pub enable_profiling: bool,
    /// Folder for traces, under `job.dump_folder`.
    pub save_traces_folder: PathBuf,
    /// torchtitan's; no effect, because a trace contains all steps.
    pub profile_freq: u64,
    /// torchtitan's; no effect.
    pub profiler_active: u64,
    /// torchtitan's; not supported: `memory` reports the second step.
    pub enable_memory_snapshot: bool,
    /// torchtitan's; no effect.
    pub save_memory_snapshot_folder: PathBuf,
    /// An HTML file for the memory report of the second step. Rank 0 writes it; rank N inserts `.rankN` before the
    /// extension.
    pub memory: Option<PathBuf>,
    /// Whether each step calls `cudaProfilerStart`, for `nsys profile --capture-range=cudaProfilerApi` and for the
    /// counts per step of `trainyard simulate --report`.
    pub cuda_profiler: bool,
}

impl Default for ProfilingSection {
    fn default() -> Self {
        ProfilingSection {
            enable_profiling: false,
            save_traces_folder: "profile_traces".into(),
            profile_freq: 10,
            profiler_active: 1,
            enable_memory_snapshot: false,
            save_memory_snapshot_folder: "memory_snapshot".into(),
            memory: None,
            cuda_profiler: false,
        }
    }
}

impl ProfilingSection {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        at_least_one("profiling.profile_freq", self.profile_freq)?;
        at_least_one("profiling.profiler_active", self.profiler_active)?;
        self.check_memory()?;
        if self.enable_memory_snapshot {
            let setting = "profiling.enable_memory_snapshot = true";
            return Err(ConfigError::not_built(
                setting,
                "profiling.memory = \"FILE.html\"",
            ));
        }
        if self.profiler_active <= self.profile_freq {
            return Ok(());
        }
        let (active, freq) = (self.profiler_active, self.profile_freq);
        Err(ConfigError::contradiction(
            format!("profiling.profiler_active = {active} exceeds profiling.profile_freq = {freq}"),
            format!("use profiling.profiler_active = {freq} or less"),
        ))
    }

    fn check_memory(&self) -> Result<(), ConfigError> {
        match &self.memory {
            Some(path) if path.file_name().is_none() => Err(ConfigError::contradiction(
                format!("profiling.memory = {path:?} names no file"),
                "use a name such as memory.html",
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::Config;

    #[test]
    fn the_memory_report_needs_a_file_name() {
        let config = Config::parse("", &["--profiling.memory=out/step.html".into()]).unwrap();
        assert_eq!(
            config.profiling.memory.as_deref(),
            Some("out/step.html".as_ref())
        );
        let rejected = Config::parse("[profiling]\nmemory = ''\n", &[]).unwrap_err();
        assert!(rejected.to_string().contains("memory.html"), "{rejected}");
    }
}

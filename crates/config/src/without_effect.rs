//! Keys that are read because configs of torchtitan have them, and that change nothing here.

use crate::{CommSection, Config, ProfilingSection};

impl Config {
    /// Those of them that were changed: somebody expects something of them.
    pub fn without_effect(&self) -> Vec<&'static str> {
        let (comm, profiling) = (CommSection::default(), ProfilingSection::default());
        let changed = [
            (
                "comm.trace_buf_size",
                self.comm.trace_buf_size != comm.trace_buf_size,
            ),
            (
                "profiling.profile_freq",
                self.profiling.profile_freq != profiling.profile_freq,
            ),
            (
                "profiling.profiler_active",
                self.profiling.profiler_active != profiling.profiler_active,
            ),
            (
                "profiling.save_memory_snapshot_folder",
                self.profiling.save_memory_snapshot_folder != profiling.save_memory_snapshot_folder,
            ),
        ];
        let changed = changed.into_iter().filter(|(_, is_changed)| *is_changed);
        changed.map(|(key, _)| key).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::Config;

    #[test]
    fn what_was_changed_in_vain_is_named() {
        assert_eq!(Config::default().without_effect(), [""; 0]);
        let config = Config::parse(
            "[profiling]\nprofile_freq = 100\n[comm]\ntrace_buf_size = 0\n",
            &[],
        );
        let expected = ["comm.trace_buf_size", "profiling.profile_freq"];
        assert_eq!(config.unwrap().without_effect(), expected);
    }

    #[test]
    fn a_snapshot_that_would_not_be_written_is_refused() {
        let refused = Config::parse("profiling.enable_memory_snapshot = true", &[]).unwrap_err();
        assert!(
            refused.to_string().contains("profiling.memory"),
            "{refused}"
        );
    }
}

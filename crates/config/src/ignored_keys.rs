//! Keys that are accepted because torchtitan has them, but have no effect.

use crate::{CommSection, Config, ProfilingSection};

impl Config {
    /// The ignored keys that are not at their defaults, so that the user can be warned.
    pub fn ignored_keys(&self) -> Vec<&'static str> {
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
    fn changed_keys_without_effect_are_listed() {
        assert_eq!(Config::default().ignored_keys(), [""; 0]);
        let config = Config::parse(
            "[profiling]\nprofile_freq = 100\n[comm]\ntrace_buf_size = 0\n",
            &[],
        );
        let expected = ["comm.trace_buf_size", "profiling.profile_freq"];
        assert_eq!(config.unwrap().ignored_keys(), expected);
    }

    #[test]
    fn an_unsupported_memory_snapshot_is_rejected() {
        let rejected = Config::parse("profiling.enable_memory_snapshot = true", &[]).unwrap_err();
        assert!(
            rejected.to_string().contains("profiling.memory"),
            "{rejected}"
        );
    }
}

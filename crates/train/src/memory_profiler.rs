//! Memory profile of one step: peak and allocated bytes by kind in the log, and an HTML chart.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use trainyard_config::Config;
use trainyard_torch::memory;
use trainyard_trace::{
    ByteUnit, BytesByKind, Ledger, MemoryHistory, MemoryKind, Span, draw_memory,
};

use crate::error::{Result, TrainError};

/// A request to profile the memory of one step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MemoryProfiler {
    step: u64,
    rank: usize,
    path: PathBuf,
}

impl MemoryProfiler {
    /// The profiler that the config enables, for a run that starts after `steps_taken` steps.
    pub(crate) fn from_config(
        config: &Config,
        rank: usize,
        steps_taken: u64,
    ) -> Option<MemoryProfiler> {
        let path = config.profiling.memory.as_ref()?;
        Some(MemoryProfiler {
            // The first step allocates optimizer state and buffers; the second is like all later ones.
            step: (steps_taken + 2).min(config.training.steps),
            rank,
            path: path_of_rank(path, rank),
        })
    }

    /// The step to profile, counted from 1.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Records the allocations of `body`, which takes the step.
    pub(crate) fn profile<T>(
        self,
        ledger: &Ledger,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<(T, MemoryProfile)> {
        let allocated = memory::report()?.allocated;
        let started_ns = ledger.now_ns();
        let (outcome, allocations) = memory::record(body);
        let outcome = outcome?;
        let times = (started_ns, ledger.now_ns());
        let profile = MemoryProfile {
            history: MemoryHistory::new(by_kind(allocated), times, &allocations),
            spans: ledger.events().spans,
            profiler: self,
        };
        Ok((outcome, profile))
    }
}

/// The recorded allocations of a step.
pub(crate) struct MemoryProfile {
    history: MemoryHistory,
    spans: Vec<Span>,
    profiler: MemoryProfiler,
}

impl MemoryProfile {
    /// Writes the chart of this rank; rank 0 also logs a summary.
    pub(crate) fn write(&self) -> Result<()> {
        let MemoryProfiler { step, rank, path } = &self.profiler;
        let title = format!("Memory of rank {rank} in step {step}");
        let page = draw_memory(&title, &self.history, &self.spans);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(TrainError::io(folder))?;
        }
        std::fs::write(path, page).map_err(TrainError::io(path))?;
        if *rank == 0 {
            tracing::info!("{}", line("peak", &self.history.peak().bytes));
            tracing::info!("{}", line("allocated", &self.history.last().bytes));
            tracing::info!("memory chart of step {step} written to {}", path.display());
        }
        Ok(())
    }
}

/// Reorders counters from the order of `memory::KINDS` to that of [`MemoryKind::index`].
fn by_kind(counters: [u64; memory::KINDS.len()]) -> BytesByKind {
    let mut bytes = BytesByKind::default();
    for (kind, counter) in memory::KINDS.into_iter().zip(counters) {
        bytes[kind.index()] = counter;
    }
    bytes
}

/// The total with its unit, and the bytes of each kind in the same unit.
fn line(what: &str, bytes: &BytesByKind) -> String {
    let total = bytes.iter().sum();
    let unit = ByteUnit::fitting(total);
    let num_decimals = if unit.bytes() == 1 { 0 } else { 1 };
    let amount = |bytes: u64| format!("{:.num_decimals$}", unit.of(bytes));
    let parts = MemoryKind::ALL.map(|kind| {
        let bytes = bytes[kind.index()];
        format!("{} {}", kind.plural(), amount(bytes))
    });
    format!(
        "memory: {what} {} {} ({})",
        amount(total),
        unit.name(),
        parts.join(", ")
    )
}

/// The path as given for rank 0; for rank N with `.rankN` before the extension.
fn path_of_rank(path: &Path, rank: usize) -> PathBuf {
    if rank == 0 {
        return path.to_owned();
    }
    let mut name = OsString::from(path.file_stem().unwrap_or_default());
    name.push(format!(".rank{rank}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};
    use trainyard_trace::SpanKind;

    use super::*;

    fn config(path: &Path) -> Config {
        let mut config = Config::default();
        config.training.steps = 10;
        config.profiling.memory = Some(path.to_owned());
        config
    }

    #[test]
    fn the_log_line_lists_all_kinds() {
        let mib = |count: u64| count << 20;
        let bytes = [111, 111, 222, 350, 12, 6].map(mib);
        assert_eq!(
            line("peak", &bytes),
            "memory: peak 812.0 MiB (parameters 111.0, gradients 111.0, optimizer 222.0, \
             activations 350.0, communication 12.0, other 6.0)"
        );
        assert!(line("allocated", &[0; 6]).starts_with("memory: allocated 0 B (parameters 0, "));
    }

    #[test]
    fn every_rank_has_a_file_of_its_own() {
        let of = |path: &str, rank| path_of_rank(Path::new(path), rank);
        assert_eq!(of("a/out.html", 0), Path::new("a/out.html"));
        assert_eq!(of("a/out.html", 3), Path::new("a/out.rank3.html"));
        assert_eq!(of("a.b/out", 12), Path::new("a.b/out.rank12"));
    }

    #[test]
    fn the_second_step_of_a_run_is_profiled_or_its_only_one() {
        let config = config(Path::new("out.html"));
        let step =
            |taken| MemoryProfiler::from_config(&config, 0, taken).map(|profiler| profiler.step());
        assert_eq!((step(0), step(5), step(9)), (Some(2), Some(7), Some(10)));
        assert_eq!(MemoryProfiler::from_config(&Config::default(), 0, 0), None);
    }

    #[test]
    fn the_chart_has_the_allocations_of_the_step() {
        memory::observe();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/out.html");
        let ledger = Ledger::new(1);
        let profiler = MemoryProfiler::from_config(&config(&path), 1, 0).unwrap();
        let ((), profile) = profiler
            .profile(&ledger, || {
                let _span = ledger.enter(SpanKind::Forward, "forward");
                memory::scope(MemoryKind::Activation, || {
                    drop(Tensor::zeros([1 << 20], (Kind::Float, Device::Cpu)));
                });
                Ok(())
            })
            .unwrap();
        let kind = MemoryKind::Activation.index();
        let (first, peak) = (profile.history.first().bytes, profile.history.peak().bytes);
        assert_eq!(peak[kind] - first[kind], 4 << 20);
        profile.write().unwrap();
        let page = std::fs::read_to_string(folder.path().join("new/out.rank1.html")).unwrap();
        assert!(page.contains("Memory of rank 1 in step 2"));
        assert!(page.contains("class=\"phase forward\""));
    }

    #[test]
    fn a_step_that_fails_is_not_reported() {
        let profiler = MemoryProfiler::from_config(&config(Path::new("out.html")), 0, 0).unwrap();
        let failed = profiler.profile(&Ledger::new(0), || Err::<(), _>(TrainError::NoParameters));
        assert!(matches!(failed, Err(TrainError::NoParameters)));
    }
}

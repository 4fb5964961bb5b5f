//! The memory of one step: peak and held bytes by kind in the log, and a picture.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use trainyard_config::Config;
use trainyard_torch::memory;
use trainyard_trace::{
    ByteUnit, BytesByKind, Ledger, MemoryHistory, MemoryKind, Span, draw_memory,
};

use crate::error::{Result, TrainError};

/// The order to watch a step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MemoryWatch {
    step: u64,
    rank: usize,
    path: PathBuf,
}

impl MemoryWatch {
    /// What the config asks for, when `steps_taken` steps were taken before this run.
    pub(crate) fn from_config(
        config: &Config,
        rank: usize,
        steps_taken: u64,
    ) -> Option<MemoryWatch> {
        let path = config.profiling.memory.as_ref()?;
        Some(MemoryWatch {
            // The first step brings optimiser state and buffers into being; the second is like all
            // that follow.
            step: (steps_taken + 2).min(config.training.steps),
            rank,
            path: path_of_rank(path, rank),
        })
    }

    /// The step to watch, counted from 1.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Watches the memory of `body`, which is the step.
    pub(crate) fn watch<T>(
        self,
        ledger: &Ledger,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<(T, MemoryRecord)> {
        let held = memory::report()?.held;
        let started_ns = ledger.now_ns();
        let (outcome, allocations) = memory::record(body);
        let outcome = outcome?;
        let times = (started_ns, ledger.now_ns());
        let record = MemoryRecord {
            history: MemoryHistory::new(by_kind(held), times, &allocations),
            spans: ledger.events().spans,
            watch: self,
        };
        Ok((outcome, record))
    }
}

/// What was seen of a step.
pub(crate) struct MemoryRecord {
    history: MemoryHistory,
    spans: Vec<Span>,
    watch: MemoryWatch,
}

impl MemoryRecord {
    /// Writes the picture of this rank; the first rank says in the log what is in it.
    pub(crate) fn write(&self) -> Result<()> {
        let MemoryWatch { step, rank, path } = &self.watch;
        let title = format!("Memory of rank {rank} in step {step}");
        let page = draw_memory(&title, &self.history, &self.spans);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(TrainError::io(folder))?;
        }
        std::fs::write(path, page).map_err(TrainError::io(path))?;
        if *rank == 0 {
            tracing::info!("{}", line("peak", &self.history.peak().held));
            tracing::info!("{}", line("held", &self.history.last().held));
            tracing::info!("memory of step {step} drawn in {}", path.display());
        }
        Ok(())
    }
}

/// Counters are in the order of `memory::KINDS`, reports in that of the kinds themselves.
fn by_kind(counters: [u64; memory::KINDS.len()]) -> BytesByKind {
    let mut bytes = BytesByKind::default();
    for (kind, counter) in memory::KINDS.into_iter().zip(counters) {
        bytes[kind.index()] = counter;
    }
    bytes
}

/// The total with its unit, and its parts in the same unit.
fn line(what: &str, held: &BytesByKind) -> String {
    let total = held.iter().sum();
    let unit = ByteUnit::fitting(total);
    let num_decimals = if unit.bytes() == 1 { 0 } else { 1 };
    let amount = |bytes: u64| format!("{:.num_decimals$}", unit.of(bytes));
    let parts = MemoryKind::ALL.map(|kind| {
        let bytes = held[kind.index()];
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
    fn the_line_is_readable() {
        let mib = |count: u64| count << 20;
        let held = [111, 111, 222, 350, 12, 6].map(mib);
        assert_eq!(
            line("peak", &held),
            "memory: peak 812.0 MiB (parameters 111.0, gradients 111.0, optimizer 222.0, \
             activations 350.0, communication 12.0, other 6.0)"
        );
        assert!(line("held", &[0; 6]).starts_with("memory: held 0 B (parameters 0, "));
    }

    #[test]
    fn every_rank_has_a_file_of_its_own() {
        let of = |path: &str, rank| path_of_rank(Path::new(path), rank);
        assert_eq!(of("a/out.html", 0), Path::new("a/out.html"));
        assert_eq!(of("a/out.html", 3), Path::new("a/out.rank3.html"));
        assert_eq!(of("a.b/out", 12), Path::new("a.b/out.rank12"));
    }

    #[test]
    fn the_second_step_of_a_run_is_watched_or_its_only_one() {
        let config = config(Path::new("out.html"));
        let step = |taken| MemoryWatch::from_config(&config, 0, taken).map(|watch| watch.step());
        assert_eq!((step(0), step(5), step(9)), (Some(2), Some(7), Some(10)));
        assert_eq!(MemoryWatch::from_config(&Config::default(), 0, 0), None);
    }

    #[test]
    fn a_step_is_drawn_with_what_it_allocated() {
        memory::observe();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/out.html");
        let ledger = Ledger::new(1);
        let watch = MemoryWatch::from_config(&config(&path), 1, 0).unwrap();
        let ((), record) = watch
            .watch(&ledger, || {
                let _span = ledger.enter(SpanKind::Forward, "forward");
                memory::scope(MemoryKind::Activation, || {
                    drop(Tensor::zeros([1 << 20], (Kind::Float, Device::Cpu)));
                });
                Ok(())
            })
            .unwrap();
        let kind = MemoryKind::Activation.index();
        let (first, peak) = (record.history.first().held, record.history.peak().held);
        assert_eq!(peak[kind] - first[kind], 4 << 20);
        record.write().unwrap();
        let page = std::fs::read_to_string(folder.path().join("new/out.rank1.html")).unwrap();
        assert!(page.contains("Memory of rank 1 in step 2"));
        assert!(page.contains("class=\"phase forward\""));
    }

    #[test]
    fn a_step_that_fails_is_not_reported() {
        let watch = MemoryWatch::from_config(&config(Path::new("out.html")), 0, 0).unwrap();
        let failed = watch.watch(&Ledger::new(0), || Err::<(), _>(TrainError::NoParameters));
        assert!(matches!(failed, Err(TrainError::NoParameters)));
    }
}

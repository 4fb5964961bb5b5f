//! `trainyard trace`: where the time of a run goes.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use trainyard_trace::{draw_step, read_all, summarize};

use crate::failure::Failure;

/// Summarize traces: compute, overlapped and exposed communication, per kind; the slowest rank
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard trace outputs/profile_traces\n  \
    trainyard trace rank0.json rank1.json --json\n  \
    trainyard trace /tmp/nccl_trace_rank_*\n  \
    trainyard trace outputs/profile_traces --svg step.svg --step 5")]
pub struct Trace {
    /// Traces of Trainyard or of PyTorch's profiler, or dumps of PyTorch's Flight Recorder, one per rank; or directories of
    /// them
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Draw one step of all ranks into this SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// The step to draw; the last one by default
    #[arg(long, requires = "svg")]
    step: Option<u64>,
}

impl Trace {
    /// Reads the files and prints the summary.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let summary = summarize(&self.files).map_err(|error| {
            Failure::new(error).hint(
                "`--profiling.enable_profiling true` writes traces, and so does `torch.profiler`",
            )
        })?;
        if let Some(path) = &self.svg {
            self.draw(path)?;
        }
        if self.json {
            let json = serde_json::to_string_pretty(&summary).map_err(Failure::new)?;
            println!("{json}");
        } else {
            println!("{summary}");
        }
        Ok(ExitCode::SUCCESS)
    }

    fn draw(&self, path: &Path) -> Result<(), Failure> {
        let ranks = read_all(&self.files).map_err(Failure::new)?;
        let svg = draw_step(&ranks, self.step).ok_or_else(|| {
            Failure::new("the trace has no such step").hint("steps are numbered from 1")
        })?;
        std::fs::write(path, svg)
            .map_err(|error| Failure::new(format!("{}: {error}", path.display())))
    }
}

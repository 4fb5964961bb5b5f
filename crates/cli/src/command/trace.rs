//! `trainyard trace`: where the time of a run went.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use trainyard_trace::summarize;

use crate::failure::Failure;

/// Summarise traces: compute, communication, hidden and exposed, per kind; the slowest rank
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard trace outputs/profile_trace\n  \
    trainyard trace rank0.json rank1.json --json")]
pub struct Trace {
    /// Trace files, one per rank, or folders of them
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Trace {
    /// Reads the files and prints the summary.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let summary = summarize(&self.files).map_err(|error| {
            Failure::new(error).hint("traces are written with `--profiling.enable_profiling true`")
        })?;
        if self.json {
            let json = serde_json::to_string_pretty(&summary).map_err(Failure::new)?;
            println!("{json}");
        } else {
            println!("{summary}");
        }
        Ok(ExitCode::SUCCESS)
    }
}

//! `trainyard plan measure`: profiles this node's operators and collectives.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::de::DeserializeOwned;
use trainyard_plan::cost_model::{CommSample, NodeProfile, ProfiledSteps};

use super::write;
use crate::engine;
use crate::failure::Failure;

/// Profile this node's operators and collectives, so that `plan predict` can predict any strategy on it
///
/// All ranks train the config's model at the same time, each on its own, for a few steps of several sizes; then
/// they compute and run collectives of several sizes. This takes about a minute, and the node should be idle
/// otherwise.
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard plan measure CONFIG.toml --nproc N --output FILE [--SECTION.KEY VALUE]...",
    after_help = "Example:\n  trainyard plan measure configs/llama-small.toml --nproc 2 --output profile.json"
)]
pub(super) struct Measure {
    /// The config whose model is profiled
    #[arg(value_name = "CONFIG.toml")]
    config: PathBuf,
    /// Number of ranks on this node
    #[arg(long, value_name = "N", default_value_t = 2)]
    nproc: usize,
    /// Where to write the profile
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
}

impl Measure {
    /// Profiles the node and writes the result.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode, Failure> {
        let nproc = self.nproc.to_string();
        let mut operators = vec!["bench", "operators", "--nproc", &nproc];
        let config = self.config.display().to_string();
        operators.push(&config);
        operators.extend(overrides.iter().map(String::as_str));
        eprintln!("profiling operators on {nproc} ranks ...");
        let steps: Vec<ProfiledSteps> = lines(&operators)?;
        let comm_samples: Vec<CommSample> = match self.nproc {
            1 => Vec::new(),
            _ => {
                eprintln!("profiling collectives ...");
                let work = [
                    "--work",
                    "1,8",
                    "--min-bytes",
                    "65536",
                    "--max-bytes",
                    "16777216",
                ];
                let comm = ["bench", "comm", "--json", "--nproc", &nproc];
                lines(&[&comm[..], &work].concat())?
            }
        };
        let profile = NodeProfile::fit(self.nproc, &steps, &comm_samples).map_err(Failure::new)?;
        let text = serde_json::to_string_pretty(&profile).map_err(Failure::new)?;
        write(&self.output, &text)?;
        println!("{}", summary(&self.output, &profile));
        Ok(ExitCode::SUCCESS)
    }
}

fn summary(path: &Path, profile: &NodeProfile) -> String {
    let matmuls = profile
        .operators
        .values()
        .filter(|operator| operator.over_flops);
    let fastest = matmuls
        .map(|operator| operator.cost.per_unit)
        .filter(|s| *s > 0.0);
    let gflops = 1.0 / fastest.fold(f64::INFINITY, f64::min) / 1e9;
    format!(
        "{}: {} operators, {} collectives, {gflops:.0} GFLOP/s per rank at best",
        path.display(),
        profile.operators.len(),
        profile.collectives.len(),
    )
}

/// Runs the engine and parses its output, one JSON value per line.
fn lines<T: DeserializeOwned>(arguments: &[&str]) -> Result<Vec<T>, Failure> {
    let failed = |error| Failure::new(format!("`{}` failed: {error}", arguments.join(" ")));
    let printed = engine::ask(Vec::new(), arguments)?.map_err(failed)?;
    let text = String::from_utf8_lossy(&printed);
    let rows = text.lines().filter(|line| line.starts_with('{'));
    let rows: Result<Vec<T>, _> = rows.map(serde_json::from_str).collect();
    rows.map_err(Failure::new)
}

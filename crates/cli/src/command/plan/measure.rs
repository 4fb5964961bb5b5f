//! `trainyard plan measure`: what this machine does with a model's operators and with messages.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::de::DeserializeOwned;
use trainyard_plan::machine::{Machine, Message, Stepped};

use super::write;
use crate::engine;
use crate::failure::Failure;

/// Time this machine's operators and collectives, so that `plan predict` can price any strategy on it
///
/// Every rank trains the config's model alone for a few steps of several sizes, all at the same time; then
/// they compute and exchange messages of several sizes. It takes about a minute, and the machine should do nothing else.
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard plan measure CONFIG.toml --nproc N --output FILE [--SECTION.KEY VALUE]...",
    after_help = "Example:\n  trainyard plan measure configs/llama-small.toml --nproc 2 --output machine.json"
)]
pub(super) struct Measure {
    /// The config whose model is run
    #[arg(value_name = "CONFIG.toml")]
    config: PathBuf,
    /// How many ranks this machine will have
    #[arg(long, value_name = "N", default_value_t = 2)]
    nproc: usize,
    /// Where to write what was seen
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
}

impl Measure {
    /// Measures and writes.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode, Failure> {
        let nproc = self.nproc.to_string();
        let mut operators = vec!["bench", "operators", "--nproc", &nproc];
        let config = self.config.display().to_string();
        operators.push(&config);
        operators.extend(overrides.iter().map(String::as_str));
        eprintln!("timing operators on {nproc} ranks ...");
        let steps: Vec<Stepped> = lines(&operators)?;
        let messages: Vec<Message> = match self.nproc {
            1 => Vec::new(),
            _ => {
                eprintln!("timing collectives ...");
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
        let machine = Machine::fit(self.nproc, &steps, &messages).map_err(Failure::new)?;
        let text = serde_json::to_string_pretty(&machine).map_err(Failure::new)?;
        write(&self.output, &text)?;
        println!("{}", told(&self.output, &machine));
        Ok(ExitCode::SUCCESS)
    }
}

fn told(path: &Path, machine: &Machine) -> String {
    let product = machine.operators.values().filter(|rate| rate.over_flops);
    let fastest = product.map(|rate| rate.line.per_unit).filter(|s| *s > 0.0);
    let pace = 1.0 / fastest.fold(f64::INFINITY, f64::min) / 1e9;
    format!(
        "{}: {} operators, {} collectives, {pace:.0} GFLOP/s a rank at best",
        path.display(),
        machine.operators.len(),
        machine.collectives.len(),
    )
}

/// What the engine prints, a JSON value a line.
fn lines<T: DeserializeOwned>(arguments: &[&str]) -> Result<Vec<T>, Failure> {
    let failed = |said| Failure::new(format!("`{}` failed: {said}", arguments.join(" ")));
    let printed = engine::ask(arguments)?.map_err(failed)?;
    let text = String::from_utf8_lossy(&printed);
    let rows = text.lines().filter(|line| line.starts_with('{'));
    let rows: Result<Vec<T>, _> = rows.map(serde_json::from_str).collect();
    rows.map_err(Failure::new)
}

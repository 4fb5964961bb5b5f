//! `trainyard plan`: how to parallelize a model over a cluster, whether it fits, how fast it is, and why.

mod calibrate;
mod check;
mod compare;
mod dry_run;
mod measure;
mod predict;
pub(super) mod request;
mod search;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use trainyard_interop::Framework;

use crate::failure::Failure;

/// Find the fastest way to parallelize a model over a cluster, and explain it
///
/// Estimates the memory and step time of every strategy without creating tensors, and explains the fastest that
/// fits. Decoders are described by formulas; the memory and communication of any other model are counted in dry runs.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Examples:\n  \
    trainyard plan --model configs/llama3-70b.toml --cluster 64xH100 --global-batch 256 --seq-len 8192\n  \
    trainyard plan --model my-llama/config.json --cluster cluster.toml --global-batch 512 --seq-len 4096 --html plan.html\n  \
    trainyard plan --model configs/llama3-8b.toml --cluster 16xH100 --global-batch 64 --seq-len 8192 --emit torchtitan --output job.toml\n  \
    trainyard plan --model configs/llama3-405b.toml --cluster 16384xH100 --global-batch 2048 --seq-len 8192 --compare-mesh pp=16,tp=8\n  \
    trainyard plan --model configs/llama3-8b.toml --cluster 16xH100 --global-batch 64 --seq-len 8192 --dry-run=5\n  \
    trainyard plan --model configs/llama3-8b.toml --cluster 2x64xH100@10Gb/s,30ms --global-batch 512 --seq-len 8192\n  \
    trainyard plan --model configs/cnn.toml --cluster 8xH100 --global-batch 512\n  \
    trainyard plan check pretrain.sh --cluster 64xH100"
)]
pub struct Plan {
    #[command(flatten)]
    search: Option<search::Search>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Calibrate(calibrate::Calibrate),
    Check(check::Check),
    Compare(compare::Compare),
    Measure(measure::Measure),
    Predict(predict::Predict),
}

impl Plan {
    /// Runs the subcommand, or the search without one.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode, Failure> {
        match (self.command, self.search) {
            (Some(Command::Calibrate(calibrate)), _) => calibrate.execute(),
            (Some(Command::Check(check)), _) => check.execute(overrides),
            (Some(Command::Compare(compare)), _) => compare.execute(),
            (Some(Command::Measure(measure)), _) => measure.execute(overrides),
            (Some(Command::Predict(predict)), _) => predict.execute(overrides),
            (None, Some(search)) => search.execute(overrides),
            (None, None) => Err(Failure::usage("missing arguments")
                .hint("give --model, --cluster, --global-batch and, for a decoder, --seq-len")),
        }
    }
}

fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
}

const FRAMEWORKS: [(&str, Framework); 6] = [
    ("trainyard", Framework::Trainyard),
    ("torchtitan", Framework::Torchtitan),
    ("torchtitan-flags", Framework::TorchtitanCommandLine),
    ("megatron", Framework::Megatron),
    ("deepspeed", Framework::DeepSpeed),
    ("accelerate", Framework::Accelerate),
];

fn framework(name: &str) -> Result<Framework, String> {
    let found = FRAMEWORKS.iter().find(|(known, _)| *known == name);
    let names = FRAMEWORKS.map(|(known, _)| known).join(", ");
    found
        .map(|(_, framework)| *framework)
        .ok_or_else(|| format!("use one of {names}"))
}

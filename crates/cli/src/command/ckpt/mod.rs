//! `trainyard ckpt`: inspects, verifies, repairs, compares and converts checkpoints.

mod convert;
mod diff;
mod inspect;
mod repair;
mod verify;

use std::path::Path;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use trainyard_checkpoint::{Checkpoint, latest, store};

use crate::failure::Failure;

/// Inspect, verify, repair, compare and convert checkpoints
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard ckpt inspect outputs/checkpoint\n  \
    trainyard ckpt verify outputs/checkpoint/step-500\n  \
    trainyard ckpt repair outputs/checkpoint\n  \
    trainyard ckpt diff outputs/checkpoint/step-400 outputs/checkpoint/step-500\n  \
    trainyard ckpt verify s3://bucket/prefix/step-500\n\n\
    A checkpoint is at a path, or in an object store at s3://bucket/prefix; AWS_ENDPOINT_URL, AWS_REGION,\n\
    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY configure the access to it.")]
pub struct Ckpt {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Inspect(inspect::Inspect),
    Verify(verify::Verify),
    Repair(repair::Repair),
    Diff(diff::Diff),
    Convert(convert::Convert),
}

impl Ckpt {
    /// Runs the command.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        match self.command {
            Command::Inspect(inspect) => inspect.execute(),
            Command::Verify(verify) => verify.execute(),
            Command::Repair(repair) => repair.execute(),
            Command::Diff(diff) => diff.execute(),
            Command::Convert(convert) => convert.execute(),
        }
    }
}

/// The checkpoint at a path: the directory of a step, or the newest one in a directory of steps.
fn open(path: &Path) -> Result<Checkpoint, Failure> {
    let store = store::open(path).map_err(Failure::new)?;
    let newest = latest(&*store).map_err(Failure::new)?;
    let folder = newest.unwrap_or_else(|| ".".to_owned());
    Checkpoint::open(store, &folder).map_err(|error| {
        Failure::new(error)
            .hint("give the directory of a step, or the directory that contains the steps")
    })
}
